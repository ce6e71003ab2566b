// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/stream_engine.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cuda/args.h"
#include "kernels/cuda/image.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/driver/thread.h"
#include "src/exec/cuda/stream_work.h"
#include "src/exec/cuda/urgent_stream.h"
#include "src/exec/fabric.h"
#include "src/exec/operation.h"
#include "src/exec/task.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

// Lists travel in pieces of at most kPiece rows or terms, so that any list fits: the lists of a piece take at most 3.5
// MiB. A piece must fit into half of the ring, or those of its lists that come after the ring's end would overwrite the
// others.
constexpr size_t kRingBytes = 8u << 20, kPiece = 256u << 10;
constexpr uint32_t kThreads = 256;
// A block is worth starting for this much work: 256 threads with four 16-byte loads each.
constexpr size_t kBlockBytes = size_t{kThreads} * 64;
// Larger copies go to the copy engine, which takes no multiprocessors. Starting it costs about as much as a launch. The
// value is a guess until several GPUs have been measured.
constexpr size_t kCopyEngineBytes = 4u << 20;
// What was launched ends within milliseconds if it gets on. Peers wait as long for a rank that has failed.
constexpr int64_t kPatience_ns = 1'000'000'000;
// A wait on the host asks the driver at once for so long, as the driver's own wait does.
constexpr int64_t kWithoutSleep_ns = 50'000;

thread_local StreamEngine* current_engine = nullptr;

constexpr const char* kPlainKernels[] = {"moeccl_copy",
                                         "moeccl_copy_rows",
                                         "moeccl_route_count",
                                         "moeccl_route_scan",
                                         "moeccl_route_fill",
                                         "moeccl_route_order",
                                         "moeccl_route_drop",
                                         "moeccl_codec_encode_7",
                                         "moeccl_codec_encode_9",
                                         "moeccl_codec_decode_7",
                                         "moeccl_codec_decode_9",
                                         "moeccl_codec_check",
                                         "moeccl_codec_add_7",
                                         "moeccl_codec_add_9",
                                         "moeccl_gradient_encode_7",
                                         "moeccl_gradient_encode_9",
                                         "moeccl_gradient_keep_7",
                                         "moeccl_gradient_keep_9",
                                         "moeccl_checksum",
                                         "moeccl_route_levels",
                                         "moeccl_route_records_count",
                                         "moeccl_route_records_scan",
                                         "moeccl_route_records_fill",
                                         "moeccl_table_take",
                                         "moeccl_table_pack",
                                         "moeccl_table_count",
                                         "moeccl_table_scan",
                                         "moeccl_table_blocks",
                                         "moeccl_table_fill",
                                         "moeccl_messages",
                                         "moeccl_walk_rows",
                                         "moeccl_walk_splits"};
constexpr const char* kTypedKernels[] = {"moeccl_reduce", "moeccl_scale_rows", "moeccl_reduce_rows", "moeccl_dot_rows",
                                         "moeccl_walk"};

Result<cuda::ModuleSet> all_kernels() {
  const moeccl::cuda::ImageOrigin origin = moeccl::cuda::image_origin();
  cuda::ModuleSet set;
  set.block_threads = kThreads;
  set.least_driver = std::max(12000, origin.driver);
  set.made_by = origin.made_by;
  for (const moeccl::cuda::Image& image : moeccl::cuda::images()) set.images.push_back({image.name, image.begin});
  if (cuda::emulated()) set.images = {{"emulated", nullptr}};
  if (set.images.empty()) {
    return error(moecclUnsupported,
                 "this MoECCL was built without nvcc and has no CUDA kernels: build it with -Dcuda=enabled");
  }
  set.functions.assign(std::begin(kPlainKernels), std::end(kPlainKernels));
  for (const char* name : kTypedKernels)
    for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) set.functions.push_back(format("{}_{}", name, type));
  return set;
}

}  // namespace

StreamEngine::Scope::Scope(StreamEngine& engine) : before_(current_engine), current_(engine.context_) {
  current_engine = &engine;
}
StreamEngine::Scope::~Scope() { current_engine = before_; }

Result<std::unique_ptr<StreamEngine>> StreamEngine::create(cuda::Context context, uint32_t sm_limit) {
  std::unique_ptr<StreamEngine> e(new StreamEngine);
  const cuda::Current current(context);
  const cuda::Driver& d = *cuda::driver();
  e->context_ = context;
  // This comes first: a driver that is too old for the kernels must not be blamed for something else that it lacks.
  MOECCL_ASSIGN_OR_RETURN(const cuda::ModuleSet kernels, all_kernels());
  MOECCL_ASSIGN_OR_RETURN(e->modules_, cuda::Modules::of(context, kernels));
  int device = 0, sms = 0, words = 0;
  MOECCL_TRY(cuda::check(d.cuCtxGetDevice(&device), "the context's device"));
  MOECCL_TRY(cuda::check(d.cuDeviceGetAttribute(&sms, cuda::kMultiprocessors, device), "the device's multiprocessors"));
  MOECCL_TRY(cuda::check(d.cuDeviceGetAttribute(&words, cuda::kStreamMemOps64, device), "the device's abilities"));
  if (words == 0) {
    return error(
        moecclUnsupported,
        "this CUDA device or driver has no 64-bit stream memory operations: update the driver to 525 or later");
  }
  const auto all = static_cast<uint32_t>(std::max(1, sms));
  e->sm_limit_ = sm_limit > 0 ? std::min(sm_limit, all) : std::max(std::min(16u, all), all / 8);
  MOECCL_ASSIGN_OR_RETURN(e->calls_, create_urgent_stream(context));
  MOECCL_ASSIGN_OR_RETURN(e->pinned_, cuda::Memory::pinned(context, kRingBytes));
  MOECCL_ASSIGN_OR_RETURN(e->device_, cuda::Memory::device(context, kRingBytes));
  return e;
}

void StreamEngine::write_word(const void* word, uint64_t value) {
  if (!status().ok()) return;
  // With the default flag, everything that the stream did before is visible to all before the value is.
  note(cuda::check(cuda::driver()->cuStreamWriteValue64_v2(stream(), reinterpret_cast<cuda::Pointer>(word), value, 0),
                   "a signal from the stream"));
}

// It asks again and again, because a thread in the driver's own wait would see neither a failure nor the timeout.
//
// The stream may not get on at all: where all hardware queues have work, it shares one with other streams, and may
// stand there behind a caller's stream that waits for the end of this very work (decision 160). Only the host can end
// that wait. It does so after a failure, and late, because of memory: as long as the caller's stream waits, nothing
// that the program puts there can reuse the operation's buffers, and the work that was launched ends first wherever it
// gets on. Where it does not, what is left of it runs beside what follows in the caller's stream. It writes to the
// buffers of an operation that has failed, whose contents are undefined; memory that a program frees stays valid until
// then, because cuMemFree waits for all streams; and a buffer that a program reuses in the order of its stream, without
// waiting for the failed communicator's end, may be overwritten (docs/cuda.md).
Status StreamEngine::wait_for(cuda::Stream stream, const std::string& what) {
  const cuda::Current current(context_);
  int64_t began_ns = now_ns(), seen_ns = began_ns;
  int64_t failed_ns = 0;  // 0: the communicator has not failed
  bool released = false;
  int rc = 0;
  while ((rc = cuda::driver()->cuStreamQuery(stream)) == cuda::kNotReady) {
    const int64_t now = now_ns(), before = std::exchange(seen_ns, now);
    if (now - before > kStopped_ns) began_ns += now - before;
    if (now - began_ns > kWithoutSleep_ns) driver::sleep_ns(20'000);
    if (fabric_ == nullptr) continue;
    if (now - began_ns > fabric_->timeout_ms * 1'000'000 && !fabric_->failed()) {
      fabric_->fail(error(moecclTimeout, "{} did not end within {} ms on the library's CUDA stream: {}", what,
                          fabric_->timeout_ms, held_up()));
    }
    if (!fabric_->failed()) continue;
    if (gives_up_) break;
    if (failed_ns == 0) failed_ns = now;
    if (now - failed_ns < kPatience_ns) continue;
    failed_ns = now;
    gives_up_ = std::exchange(released, true);
    if (gives_up_) break;
    log(LogLevel::kError, "{}: {} has not ended {} ms after a failure, and no stream waits for it any more: {}",
        fabric_->who(), what, kPatience_ns / 1'000'000, held_up());
    if (StreamWork* const work = StreamWork::current(); work != nullptr) work->release();
  }
  if (rc != cuda::kNotReady) gives_up_ = false;
  return rc == cuda::kNotReady || released ? fabric_->failure() : cuda::check(rc, what);
}

Status StreamEngine::synchronize() {
  if (Status s = wait_for(stream(), "the work of an operation"); !s.ok()) {
    note(std::move(s));
  } else {
    used_ = 0;
  }
  return status();
}

void StreamEngine::drain() {
  const cuda::Current current(context_);
  calls_.synchronize("the operation's kernels");
}

cuda::Function StreamEngine::function(const char* name, int type) const {
  return modules_->kernel(format("{}_{}", name, type)).function;
}

cuda::Function StreamEngine::function(const char* name) const { return modules_->kernel(name).function; }

Status StreamEngine::launch_blocks(cuda::Stream stream, const std::string& name, const void* args,
                                   size_t blocks) const {
  const cuda::Kernel& kernel = modules_->kernel(name);
  const size_t most = size_t{sm_limit_} * kernel.blocks_on_sm;  // the number that fits at once
  void* parameters[] = {const_cast<void*>(args)};
  return cuda::check(
      cuda::driver()->cuLaunchKernel(kernel.function, static_cast<unsigned>(std::clamp<size_t>(blocks, 1, most)), 1, 1,
                                     kThreads, 1, 1, 0, stream, parameters, nullptr),
      name);
}

void StreamEngine::launch(const std::string& kernel, const void* args, size_t work_bytes) {
  if (!status().ok()) return;
  note(launch_blocks(stream(), kernel, args, (work_bytes + kBlockBytes - 1) / kBlockBytes));
}

Status StreamEngine::launch_on(cuda::Stream stream, const char* kernel, const void* args, size_t n_threads) const {
  return launch_blocks(stream, kernel, args, (n_threads + kThreads - 1) / kThreads);
}

void StreamEngine::copy(void* dst, const void* src, size_t bytes) {
  if (bytes == 0 || !status().ok()) return;
  if (bytes >= kCopyEngineBytes) {
    calls_.copy(dst, src, bytes, "a copy");
    return;
  }
  const moeccl::cuda::CopyArgs args{dst, src, bytes};
  launch("moeccl_copy", &args, 2 * bytes);
}

void StreamEngine::clear(void* dst, size_t bytes) {
  if (status().ok()) calls_.fill(dst, 0, bytes, "zeros");
}

kernels::Scalar StreamEngine::read_scalar(const void* element, moecclDataType_t type) {
  const cuda::Current current(context_);
  alignas(8) std::byte value[8] = {};
  fetch(value, element, moecclTypeSize(type));
  return kernels::scalar_from(value, type);
}

void StreamEngine::fetch(void* host, const void* device, size_t bytes) {
  size_t at = 0;
  if (!reserve(bytes, &at)) return;
  calls_.copy(pinned_.data() + at, device, bytes, "results to the host");
  if (synchronize().ok()) std::memcpy(host, pinned_.data() + at, bytes);
}

// Allocates nothing: an allocation may wait for the device, and so for a caller's stream that waits for this rank.
bool StreamEngine::reserve(size_t bytes, size_t* offset) {
  bytes = (bytes + 255) / 256 * 256;
  if (bytes > pinned_.bytes()) {
    note(error(moecclInternalError, "a list of {} bytes does not fit the ring of {}", bytes, pinned_.bytes()));
    return false;
  }
  // Without the wait's end, lists that kernels still have to read would be overwritten.
  if (used_ + bytes > pinned_.bytes() && !synchronize().ok()) return false;
  *offset = used_;
  used_ += bytes;
  return true;
}

const void* StreamEngine::upload(const void* host, size_t bytes) {
  size_t at = 0;
  if (bytes == 0 || !reserve(bytes, &at)) return nullptr;
  std::memcpy(pinned_.data() + at, host, bytes);
  calls_.copy(device_.data() + at, pinned_.data() + at, bytes, "row lists to the device");
  return device_.data() + at;
}

void* StreamEngine::scratch(size_t bytes) {
  size_t at = 0;
  return reserve(bytes, &at) ? device_.data() + at : nullptr;
}

namespace {

std::string typed(const char* kernel, int type) { return format("{}_{}", kernel, type); }

void copy(void* dst, const void* src, size_t bytes) { current_engine->copy(dst, src, bytes); }

template <int kType>
void reduce(const kernels::ReduceArgs& a, kernels::ReduceOp op);

// A launch takes at most kMaxSources buffers, so dst holds the sum of the earlier ones, rounded to the type. A source
// that is dst itself (in place) is read first.
template <int kType>
void reduce_many(const kernels::ReduceArgs& a, kernels::ReduceOp op) {
  std::vector<const void*> srcs(a.srcs, a.srcs + a.n_srcs);
  std::vector<kernels::Scalar> scales;
  if (a.scales != nullptr) scales.assign(a.scales, a.scales + a.n_srcs);
  if (const auto own = std::find(srcs.begin(), srcs.end(), a.dst); own != srcs.end()) {
    if (!scales.empty()) std::swap(scales[0], scales[static_cast<size_t>(own - srcs.begin())]);
    std::swap(srcs[0], *own);
  }
  for (uint32_t done = 0; done < a.n_srcs;) {
    kernels::ReduceArgs part = a;
    if (done > 0) {
      --done;  // dst takes the place of the last of the earlier sources
      srcs[done] = a.dst;
      if (!scales.empty()) scales[done] = unit_scale(static_cast<moecclDataType_t>(kType));
    }
    part.srcs = srcs.data() + done;
    part.scales = scales.empty() ? nullptr : scales.data() + done;
    part.n_srcs = std::min(a.n_srcs - done, moeccl::cuda::kMaxSources);
    done += part.n_srcs;
    if (done < a.n_srcs) part.divisor = 0;
    reduce<kType>(part, op);
  }
}

template <int kType>
void reduce(const kernels::ReduceArgs& a, kernels::ReduceOp op) {
  if (a.count == 0) return;
  if (a.n_srcs > moeccl::cuda::kMaxSources) return reduce_many<kType>(a, op);
  moeccl::cuda::ReduceKernelArgs k{};
  k.dst = a.dst;
  k.count = a.count;
  k.n_srcs = a.n_srcs;
  k.divisor = a.divisor;
  k.op = static_cast<uint32_t>(op);
  k.scaled = a.scales != nullptr;
  for (uint32_t i = 0; i < a.n_srcs; ++i) {
    k.srcs[i] = a.srcs[i];
    if (a.scales != nullptr) k.scales[i].u64 = a.scales[i].u64;
  }
  const size_t bytes = a.count * moecclTypeSize(static_cast<moecclDataType_t>(kType));
  current_engine->launch(typed("moeccl_reduce", kType), &k, bytes * (a.n_srcs + 1));
}
template <int kType, kernels::ReduceOp kOp>
void reduce_with(const kernels::ReduceArgs& a) {
  reduce<kType>(a, kOp);
}
template <int kType>
void scale_copy(void* dst, const void* src, size_t count, kernels::Scalar scale) {
  reduce<kType>({.dst = dst, .srcs = &src, .scales = &scale, .count = count, .n_srcs = 1}, kernels::ReduceOp::kSum);
}

template <class T>
const T* list(const T* host, size_t n) {
  return static_cast<const T*>(current_engine->upload(host, n * sizeof(T)));
}

// Returns the arguments for rows [begin, begin + count) of a copy.
moeccl::cuda::RowsKernelArgs rows_of(const kernels::CopyRowsArgs& a, size_t begin, size_t count) {
  moeccl::cuda::RowsKernelArgs k{};
  k.dst = a.dst;
  k.src = a.src;
  if (a.dst_index != nullptr) k.dst_index = list(a.dst_index + begin, count);
  if (a.src_index != nullptr) k.src_index = list(a.src_index + begin, count);
  k.dst_first = a.dst_first + begin;
  k.src_first = a.src_first + begin;
  k.count = count;
  k.row_bytes = a.row_bytes;
  return k;
}
void copy_rows(const kernels::CopyRowsArgs& a) {
  for (size_t begin = 0; begin < a.count; begin += kPiece) {
    const moeccl::cuda::RowsKernelArgs k = rows_of(a, begin, std::min(kPiece, a.count - begin));
    current_engine->launch("moeccl_copy_rows", &k, 2 * k.count * a.row_bytes);
  }
}
template <int kType>
void scale_rows(const kernels::ScaleRowsArgs& a) {
  for (size_t begin = 0; begin < a.rows.count; begin += kPiece) {
    moeccl::cuda::RowsKernelArgs k = rows_of(a.rows, begin, std::min(kPiece, a.rows.count - begin));
    k.weights = list(a.weights + begin, k.count);
    current_engine->launch(typed("moeccl_scale_rows", kType), &k, 2 * k.count * k.row_bytes);
  }
}

// Sums rows [begin, end). Only their terms are copied to the device, so offsets start at 0.
template <int kType>
void reduce_rows_piece(const kernels::ReduceRowsArgs& a, size_t begin, size_t end) {
  static_assert(sizeof(kernels::RowTerm) == sizeof(moeccl::cuda::RowTermBits));
  const uint64_t first = a.offsets[begin];
  const std::span terms(a.terms + first, static_cast<size_t>(a.offsets[end] - first));
  uint32_t n_bases = 0;  // terms name peers, of which there may be any number
  for (const kernels::RowTerm& t : terms) n_bases = std::max(n_bases, t.segment + 1u);
  // The bases follow the offsets, so that they need no copy of their own.
  const size_t n_offsets = end - begin + 1;
  std::vector<uint64_t> words(n_offsets + n_bases);
  for (size_t i = 0; i < n_offsets; ++i) words[i] = a.offsets[begin + i] - first;
  for (size_t i = 0; i < n_bases; ++i) words[n_offsets + i] = reinterpret_cast<uint64_t>(a.bases[i]);
  moeccl::cuda::ReduceRowsKernelArgs k{};
  k.dst = a.dst;
  k.offsets = list(words.data(), words.size());
  k.bases = reinterpret_cast<const void* const*>(k.offsets + n_offsets);
  k.n_bases = n_bases;
  k.terms = reinterpret_cast<const moeccl::cuda::RowTermBits*>(list(terms.data(), terms.size()));
  if (a.weights != nullptr) k.weights = list(a.weights + first, terms.size());
  if (a.dst_index != nullptr) k.dst_index = list(a.dst_index + begin, end - begin);
  k.dst_first = a.dst_first + begin;
  k.count = end - begin;
  k.row_elements = a.row_elements;
  k.grouped = a.grouped;
  const size_t row_bytes = a.row_elements * moecclTypeSize(static_cast<moecclDataType_t>(kType));
  current_engine->launch(typed("moeccl_reduce_rows", kType), &k, (terms.size() + k.count) * row_bytes);
}
template <int kType>
void reduce_rows(const kernels::ReduceRowsArgs& a) {
  for (size_t begin = 0, end; begin < a.count; begin = end) {
    end = begin + 1;
    while (end < a.count && end - begin < kPiece / 2 && a.offsets[end + 1] - a.offsets[begin] <= kPiece / 2) ++end;
    reduce_rows_piece<kType>(a, begin, end);
  }
}

// Waits, because the products return to the host.
template <int kType>
void dot_rows(const kernels::DotRowsArgs& a) {
  const size_t row_bytes = a.row_elements * moecclTypeSize(static_cast<moecclDataType_t>(kType));
  for (size_t begin = 0; begin < a.count; begin += kPiece) {
    moeccl::cuda::DotRowsKernelArgs k{};
    k.count = std::min(kPiece, a.count - begin);
    k.out = static_cast<float*>(current_engine->scratch(k.count * sizeof(float)));
    k.a = a.a_index != nullptr ? a.a : static_cast<const std::byte*>(a.a) + begin * row_bytes;
    k.b = a.b_index != nullptr ? a.b : static_cast<const std::byte*>(a.b) + begin * row_bytes;
    if (a.a_index != nullptr) k.a_index = list(a.a_index + begin, k.count);
    if (a.b_index != nullptr) k.b_index = list(a.b_index + begin, k.count);
    k.row_elements = a.row_elements;
    current_engine->launch(typed("moeccl_dot_rows", kType), &k, 2 * k.count * row_bytes);
    current_engine->fetch(a.out + begin, k.out, k.count * sizeof(float));
  }
}

template <int kType = 0>
void fill(kernels::KernelTable& t) {
  if constexpr (kType < MOECCL_NUM_DATA_TYPES) {
    using kernels::ReduceOp;
    t.scale_copy[kType] = scale_copy<kType>;
    t.reduce[kType][0] = reduce_with<kType, ReduceOp::kSum>;
    t.reduce[kType][1] = reduce_with<kType, ReduceOp::kProd>;
    t.reduce[kType][2] = reduce_with<kType, ReduceOp::kMax>;
    t.reduce[kType][3] = reduce_with<kType, ReduceOp::kMin>;
    t.scale_rows[kType] = scale_rows<kType>;
    t.reduce_rows[kType] = reduce_rows<kType>;
    t.dot_rows[kType] = dot_rows<kType>;
    fill<kType + 1>(t);
  }
}

}  // namespace

const kernels::KernelTable& StreamEngine::table() {
  static const kernels::KernelTable table = [] {
    kernels::KernelTable t{};
    t.name = "cuda";
    t.copy = t.copy_stream = moeccl::exec::copy;
    t.copy_rows = moeccl::exec::copy_rows;
    fill(t);
    return t;
  }();
  return table;
}

}  // namespace moeccl::exec
