#include "src/api/convert.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "src/base/per_thread.h"
#include "src/comm/cuda_stream.h"

namespace moeccl::api {

namespace {

struct Error {
  std::string text;
  bool no_memory = false;  // for the text of the last failure
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
  if (*comm != nullptr) return {};
  return error(moecclInvalidArgument, "comm is {}: give a communicator that was initialised and not destroyed",
               handle == nullptr ? "NULL" : "not a live communicator");
}

namespace {

// A CUstream is a pointer to something aligned, or one of the driver's two names for default streams; our handles end
// in 0xC2.
bool may_be_cuda_stream(moecclStream_t handle) {
  const auto value = reinterpret_cast<uint64_t>(handle);
  return value == 1 || value == 2 || (value % 8 == 0 && value > 4096);
}

}  // namespace

Status find_stream(moecclStream_t handle, comm::Stream** stream) {
  *stream = nullptr;
  if (handle == nullptr) return {};
  *stream = StreamTable::get().find(handle);
  if (*stream != nullptr) return {};
  if (may_be_cuda_stream(handle) && driver::cuda::current_context() != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(*stream, comm::CudaStream::of(reinterpret_cast<driver::cuda::Stream>(handle)));
    return {};
  }
  return error(moecclInvalidArgument, "stream is not a live stream: give NULL or one of moecclStreamCreate");
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
  switch (result) {
    case moecclSuccess:
      return "moecclSuccess";
    case moecclSystemError:
      return "moecclSystemError";
    case moecclInternalError:
      return "moecclInternalError";
    case moecclInvalidArgument:
      return "moecclInvalidArgument";
    case moecclInvalidUsage:
      return "moecclInvalidUsage";
    case moecclRemoteError:
      return "moecclRemoteError";
    case moecclInProgress:
      return "moecclInProgress";
    case moecclTimeout:
      return "moecclTimeout";
    case moecclAborted:
      return "moecclAborted";
    case moecclMismatch:
      return "moecclMismatch";
    case moecclOutOfMemory:
      return "moecclOutOfMemory";
    case moecclUnsupported:
      return "moecclUnsupported";
  }
  return "unknown result code";
}

const char* moecclGetLastError(moecclComm_t handle) {
  comm::Communicator* comm = handle == nullptr ? nullptr : api::CommTable::get().find(handle);
  if (comm == nullptr) return api::thread_error();
  return comm->last_error();
}

moecclResult_t moecclGetVersion(int* version) {
  if (version == nullptr) return api::finish(api::null_argument("version", "the address of an int"));
  *version = MOECCL_VERSION;
  return moecclSuccess;
}

size_t moecclTypeSize(moecclDataType_t type) {
  static constexpr uint8_t kBytes[MOECCL_NUM_DATA_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  const auto i = static_cast<uint32_t>(type);
  return i < MOECCL_NUM_DATA_TYPES ? kBytes[i] : 0;
}
