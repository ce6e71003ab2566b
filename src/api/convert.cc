// SPDX-License-Identifier: Apache-2.0
#include "src/api/convert.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "src/base/data_type.h"
#include "src/base/names.h"
#include "src/base/per_thread.h"
#include "src/comm/cuda_stream.h"

namespace moeccl::api {

namespace {

struct Error {
  std::string text;
  bool no_memory = false;  // true if the text of the last failure could not be stored
};
struct ThreadError;
using ErrorOfThread = PerThread<Error, ThreadError>;

void set_thread_error(const std::string& text) {
  Error& e = ErrorOfThread::get();
  e.no_memory = true;
  e.text = text;
  e.no_memory = false;
}

}  // namespace

const char* thread_error() noexcept {
  try {
    const Error& e = ErrorOfThread::get();
    if (!e.no_memory) return e.text.c_str();
  } catch (const std::bad_alloc&) {
  }
  return "the process has no memory left";
}

moecclResult_t finish(const Status& status, comm::Communicator* comm) noexcept {
  if (status.ok()) return moecclSuccess;
  (void)contained([&] { return set_thread_error(status.message()), Status(); });
  if (comm != nullptr) comm->set_last_error(status.message());
  return status.code();
}

Status find_comm(moecclComm_t handle, comm::Communicator** comm) {
  *comm = CommTable::get().find(handle);
  if (*comm == nullptr) {
    return error(moecclInvalidArgument, "comm is {}: give a communicator that was initialised and not destroyed",
                 handle == nullptr ? "NULL" : "not a live communicator");
  }
  return CommTable::get().inherited(handle) ? comm::forked_communicator() : Status();
}

Status not_in_group(const comm::GroupHolds& holds, const char* what) {
  const uint32_t n = holds.count();
  if (n == 0) return {};
  return error(moecclInvalidUsage,
               "an open group holds {} call{} on this {}: call moecclGroupEnd or moecclGroupCancel first, then destroy "
               "it (it was not destroyed)",
               n, n == 1 ? "" : "s", what);
}

moecclResult_t member_of_group_that_failed(moecclResult_t result) {
  (void)contained([&]() -> Status {
    comm::Group& group = comm::Group::of_this_thread();
    if (group.open()) group.poison(contained([&] { return error(result, "{}", thread_error()); }));
    return {};
  });
  return result;
}

namespace {

// A CUstream is a pointer to something aligned, or one of the driver's two names for default streams. MoECCL's handles
// end in 0xC2.
bool may_be_cuda_stream(moecclStream_t handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  return value == 1 || value == 2 || (value % 8 == 0 && value > 4096);
}

}  // namespace

Result<comm::Stream*> find_stream(moecclStream_t handle, const comm::Communicator* comm) {
  comm::Stream* stream = nullptr;
  if (comm != nullptr) comm->hint(stream);
  if (handle == nullptr) return stream;
  stream = StreamTable::get().find(handle);
  if (stream != nullptr) {
    MOECCL_TRY(stream->ready());
    return stream;
  }
  const comm::CudaSide* cuda = comm != nullptr ? comm->cuda() : nullptr;
  if (may_be_cuda_stream(handle) && (cuda != nullptr || driver::cuda::current_context() != nullptr)) {
    MOECCL_ASSIGN_OR_RETURN(stream, comm::CudaStream::of(reinterpret_cast<driver::cuda::Stream>(handle),
                                                         cuda != nullptr ? cuda->context() : nullptr));
    if (comm != nullptr) comm->hint(stream);
    return stream;
  }
  const bool no_driver = may_be_cuda_stream(handle) && driver::cuda::loaded() && driver::cuda::driver() == nullptr;
  return error(moecclInvalidArgument, "stream is not a live stream: give NULL or one of moecclStreamCreate{}",
               no_driver ? "; CUDA streams cannot be used, because " + driver::cuda::why_absent() : "");
}

Status null_argument(const char* name, const char* wanted) {
  return error(moecclInvalidArgument, "{} is NULL: give {}", name, wanted);
}

void copy_text(const std::string& text, char* out, size_t out_bytes, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (out == nullptr || out_bytes == 0) return;
  const size_t n = std::min(text.size(), out_bytes - 1);
  std::memcpy(out, text.data(), n);
  out[n] = '\0';
}

}  // namespace moeccl::api

using namespace moeccl;

const char* moecclGetErrorString(moecclResult_t result) {
  static constexpr const char* kNames[] = {"moecclSuccess",         "moecclSystemError",  "moecclInternalError",
                                           "moecclInvalidArgument", "moecclInvalidUsage", "moecclRemoteError",
                                           "moecclInProgress",      "moecclTimeout",      "moecclAborted",
                                           "moecclMismatch",        "moecclOutOfMemory",  "moecclUnsupported"};
  static_assert(moecclUnsupported + 1 == std::size(kNames));
  return name_among(kNames, result, "unknown result code");
}

namespace {

struct Texts {
  static constexpr size_t kKept = 8;
  std::string kept[kKept];
  size_t n_given = 0;
};
using TextsOfThread = PerThread<Texts, Texts>;

}  // namespace

const char* moecclGetLastError(moecclComm_t handle) {
  // Texts are copied for the thread, because another thread may destroy the communicator in the meantime.
  try {
    Texts& texts = TextsOfThread::get();
    const auto comm = api::CommTable::get().pin(handle);
    std::string& text = texts.kept[texts.n_given++ % Texts::kKept];
    text = comm.get() != nullptr ? comm.get()->last_error() : api::thread_error();
    return text.c_str();
  } catch (const std::bad_alloc&) {
    return "the process has no memory left";
  }
}

moecclResult_t moecclGetVersion(int* version) {
  if (version == nullptr) return api::finish(api::null_argument("version", "the address of an int"));
  *version = MOECCL_VERSION;
  return moecclSuccess;
}

size_t moecclTypeSize(moecclDataType_t type) { return type_facts(type).bytes; }

const char* moecclTypeName(moecclDataType_t type) { return type_name(type); }
