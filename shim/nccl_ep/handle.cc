// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/handle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

// The program's handle.
struct ncclEpHandle {
  moeccl::shim::ep::Handle handle;
};

namespace moeccl::shim::ep {
namespace {

// Handles need no memory of the program: they hold their choices on the host. A program that brings some expects that
// another handle on the same memory knows the choices; the address stands for them.
constexpr size_t kHandleBytes = 256;

// The all-reduce of a refused call: so many bytes, of which the least remain. A program's own all-reduce, which comes
// next where only one rank makes a call that it refuses, is of another size, type or operator, and so does not take
// part in it.
constexpr size_t kRefusal = 13;

ncclResult_t check_layout(const char* function, const Group& group, ncclEpLayout_t layout) {
  const ncclEpLayout_t other = group.low_latency() ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT;
  if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR || layout == other) return ncclSuccess;
  return fail(ncclInvalidArgument, std::string(function) + ": layout is " + std::to_string(layout) +
                                       ": give NCCL_EP_LAYOUT_EXPERT_MAJOR or " +
                                       (group.low_latency() ? "NCCL_EP_LAYOUT_RANK_MAJOR" : "NCCL_EP_LAYOUT_FLAT"));
}

ncclResult_t check_top_k(const char* function, const Group& group, ncclEpLayout_t layout, int top_k) {
  if (top_k < 1 || static_cast<unsigned>(top_k) > group.config.num_experts)
    return fail(group.low_latency() ? ncclInvalidArgument : ncclInvalidUsage,
                std::string(function) + ": num_topk is " + std::to_string(top_k) + ": give 1 to num_experts");
  if (group.low_latency()) return ncclSuccess;
  const unsigned most = group.config.num_topk;
  if (most > 0 && static_cast<unsigned>(top_k) > most)
    return fail(ncclInvalidUsage, std::string(function) + ": num_topk is " + std::to_string(top_k) +
                                      ", more than the group's num_topk " + std::to_string(most));
  if (most == 0 && group.eager() && layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
    return fail(ncclInvalidUsage,
                std::string(function) +
                    ": with max_recv_tokens_per_rank = NCCL_EP_AUTO the expert-major layout needs the "
                    "group config's num_topk: set it");
  return ncclSuccess;
}

// Frees the oldest choices without a handle where too many are kept.
void forget_oldest(Group& group) {
  if (group.kept.size() <= Group::kMostKept) return;
  auto oldest = group.kept.end();
  for (auto it = group.kept.begin(); it != group.kept.end(); ++it) {
    if (it->second.routed.use_count() > 1) continue;
    if (oldest == group.kept.end() || it->second.last_handle < oldest->second.last_handle) oldest = it;
  }
  if (oldest != group.kept.end()) group.kept.erase(oldest);
}

// Gives a handle on the program's memory the choices that another one left there.
ncclResult_t share(const char* function, Group& group, const ncclEpTensor_t* memory, Handle& h) {
  const Tensors tensors(function, group.comm);
  Tensor t;
  MOECCL_EP_TRY(tensors.need("handle_mem", memory, &t));
  MOECCL_EP_TRY(tensors.check(t, {ncclUint8}, {Tensors::kAny}));
  if (t.rows() < kHandleBytes)
    return tensors.refuse(t, "has " + std::to_string(t.rows()) + " bytes: give what ncclEpHandleMemSize says");
  Group::Kept& kept = group.kept[t.data];
  if (kept.routed != nullptr && kept.routed->top_k == h.top_k) h.routed = kept.routed;
  kept = {h.routed, ++group.n_handles};
  forget_oldest(group);
  return ncclSuccess;
}

struct Counters {
  Tensor expert_counts, expert_offsets, total;
};

ncclResult_t read_counters(const Tensors& tensors, const Handle& h, const ncclEpLayoutInfo_t& info, Counters* out) {
  MOECCL_EP_TRY(tensors.read("layout_info->expert_counters", info.expert_counters, &out->expert_counts));
  MOECCL_EP_TRY(tensors.read("layout_info->expert_offsets", info.expert_offsets, &out->expert_offsets));
  MOECCL_EP_TRY(tensors.read("layout_info->recv_total_counter", info.recv_total_counter, &out->total));
  const auto n = static_cast<size_t>(h.group->n_local());
  const auto check = [&](const Tensor& t, size_t least) {
    if (!t) return ncclSuccess;
    MOECCL_EP_TRY(tensors.check(t, {ncclInt32, ncclInt64}, {Tensors::kAny}));
    return t.rows() >= least ? ncclSuccess : tensors.refuse(t, "is too small: give " + shape_text({least}));
  };
  MOECCL_EP_TRY(check(out->expert_counts, n));
  MOECCL_EP_TRY(check(out->expert_offsets, n));
  return check(out->total, 1);
}

// Rows beyond the group's limit end the step on all ranks, unless they are to be dropped.
ncclResult_t check_overflow(const char* function, const Handle& h) {
  const Group& g = *h.group;
  if (g.eager() || g.drops()) return ncclSuccess;
  std::vector<uint64_t> all(static_cast<size_t>(g.n_ranks()));
  const uint64_t mine = h.n_rows;
  MOECCL_EP_TRY(from_moeccl(moecclAllGather(&mine, all.data(), 1, moecclUint64, g.member.comm, nullptr)));
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r] > g.most_rows())
      return fail(ncclInvalidUsage, std::string(function) + ": rank " + std::to_string(r) + " gets " +
                                        std::to_string(all[r]) + " rows, max_recv_tokens_per_rank is " +
                                        std::to_string(g.most_rows()) +
                                        ": raise it, or set overflow_policy to NCCL_EP_OVERFLOW_DROP");
  return ncclSuccess;
}

// Writes what the program asked for: in expert-major order what is left of an expert's rows where some are dropped.
ncclResult_t write_counters(const Handle& h, const Counters& to, const Place& at) {
  const Group& g = *h.group;
  std::vector<int64_t> counts = h.counts, offsets = h.offsets;
  const auto most = g.drops() ? static_cast<int64_t>(g.most_rows()) : INT64_MAX;
  for (size_t e = 0; e < offsets.size(); ++e) {
    offsets[e] = std::min(offsets[e], most);
    counts[e] = std::min(counts[e], most - offsets[e]);
  }
  if (to.expert_counts) MOECCL_EP_TRY(at.put_counts(to.expert_counts, counts));
  if (to.expert_offsets) MOECCL_EP_TRY(at.put_counts(to.expert_offsets, offsets));
  if (to.total) MOECCL_EP_TRY(at.put_counts(to.total, {static_cast<int64_t>(h.n_rows)}));
  return ncclSuccess;
}

}  // namespace

Routed::~Routed() {
  for (const auto& [shape, m] : made) (void)moecclRoutingDestroy(m.routing);
}

Shape Handle::pairs() const {
  return {moecclLayoutRows, top_k, 2 * static_cast<size_t>(top_k) * sizeof(float), moecclFloat32, 0, 1};
}

Shape Handle::shape(size_t row_bytes, moecclDataType_t type, size_t scale_bytes) const {
  const bool expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
  return {expert_major ? moecclLayoutExpertMajor : moecclLayoutRows, top_k, row_bytes, type, scale_bytes, align};
}

ncclResult_t Handle::choose(const Tensor& topk, const Place& at) {
  const Group& g = *group;
  const auto k = static_cast<size_t>(top_k);
  const size_t n = topk.rows() * k;
  std::vector<int64_t> wide(n);
  if (topk.type == ncclInt64) {
    MOECCL_EP_TRY(at.read(wide.data(), topk.data, n * sizeof(int64_t)));
  } else {
    std::vector<int32_t> narrow(n);
    MOECCL_EP_TRY(at.read(narrow.data(), topk.data, n * sizeof(int32_t)));
    wide.assign(narrow.begin(), narrow.end());
  }
  Routed& r = *routed;
  ++r.version;
  r.n_tokens = topk.rows();
  r.index.resize(n);
  r.first.resize(n);
  const int64_t n_experts = g.config.num_experts;
  for (size_t i = 0; i < n; ++i) {
    const size_t row = i / k * k;
    // A number that is no expert's stays one, so that MoECCL reports it on all ranks.
    const int64_t expert = wide[i] < 0 ? -1 : std::min<int64_t>(wide[i], INT32_MAX);
    size_t column = row;
    while (column < i && wide[column] != wide[i]) ++column;
    r.first[i] = static_cast<uint8_t>(column - row);
    const bool masked = expert >= 0 && expert < n_experts && g.active[static_cast<size_t>(expert / g.n_local())] == 0;
    r.index[i] = column < i || masked ? -1 : static_cast<int32_t>(expert);
  }
  return ncclSuccess;
}

ncclResult_t Handle::routing(const Shape& shape, const float* weights, moecclRouting_t* out) {
  moecclMoe_t layer = nullptr;
  MOECCL_EP_TRY(group->layer(shape, &layer));
  Routed& r = *routed;
  Routed::Made& m = r.made[shape];
  if (m.routing == nullptr || m.version != r.version || m.weighted || weights != nullptr) {
    m.version = 0;
    m.weighted = weights != nullptr;
    MOECCL_EP_TRY(from_moeccl(m.routing == nullptr
                                  ? moecclRoutingCreate(&m.routing, layer, r.index.data(), weights, r.n_tokens)
                                  : moecclRoutingUpdate(m.routing, r.index.data(), weights, r.n_tokens)));
    m.version = r.version;
  }
  *out = m.routing;
  return ncclSuccess;
}

ncclResult_t Handle::info(moecclRouting_t routing, moecclRoutingInfo_t* out) const {
  *out = {};
  out->size = sizeof *out;
  return from_moeccl(moecclRoutingGetInfo(routing, out));
}

ncclResult_t Handle::by_pairs(moecclRouting_t* out, moecclRoutingInfo_t* about) {
  MOECCL_EP_TRY(routing(pairs(), nullptr, out));
  return info(*out, about);
}

ncclResult_t Handle::count() {
  if (counted == routed->version) return ncclSuccess;
  moecclRouting_t routing = nullptr;
  moecclRoutingInfo_t about;
  MOECCL_EP_TRY(by_pairs(&routing, &about));
  counts.assign(about.expert_counts, about.expert_counts + about.n_local_experts);
  offsets.clear();
  n_rows = about.n_rows;
  if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) {
    int64_t row = 0;
    for (int64_t& n : counts) {
      n = (n + align - 1) / align * align;
      offsets.push_back(row);
      row += n;
    }
    n_rows = static_cast<size_t>(row);
  }
  counted = routed->version;
  return ncclSuccess;
}

void Handle::refuse_count() {
  moecclMoe_t layer = nullptr;
  const Shape shape = pairs();
  if (group->layer(shape, &layer) != ncclSuccess) return;
  Routed::Made& m = routed->made[shape];
  m.version = 0;
  // NULL for the choices of a token is an error that all ranks hear of.
  (void)(m.routing == nullptr ? moecclRoutingCreate(&m.routing, layer, nullptr, nullptr, 1)
                              : moecclRoutingUpdate(m.routing, nullptr, nullptr, 1));
}

ncclResult_t Handle::exchange(const float* weights, std::vector<float>* got) {
  Routed& r = *routed;
  moecclRouting_t routing = nullptr;
  moecclRoutingInfo_t about;
  MOECCL_EP_TRY(by_pairs(&routing, &about));
  const auto k = static_cast<size_t>(top_k);
  // One word more than none, so that the call sees host memory on a rank without tokens or rows.
  std::vector<float> send(2 * r.n_tokens * k + 1), recv(2 * about.n_rows * k + 1);
  for (size_t t = 0; t < r.n_tokens; ++t) {
    std::memcpy(&send[2 * t * k], &r.index[t * k], k * sizeof(float));
    if (weights != nullptr) std::memcpy(&send[(2 * t + 1) * k], &weights[t * k], k * sizeof(float));
  }
  MOECCL_EP_TRY(from_moeccl(moecclDispatch(routing, send.data(), recv.data(), nullptr)));
  r.received.resize(about.n_rows * k);
  if (got != nullptr) got->resize(about.n_rows * k);
  for (size_t row = 0; row < about.n_rows; ++row) {
    std::memcpy(&r.received[row * k], &recv[2 * row * k], k * sizeof(float));
    if (got != nullptr) std::memcpy(&(*got)[row * k], &recv[(2 * row + 1) * k], k * sizeof(float));
  }
  r.pairs_version = r.version;
  return ncclSuccess;
}

bool Handle::rows_are_routed() const {
  return std::any_of(routed->made.begin(), routed->made.end(), [&](const auto& made) {
    const auto& [shape, m] = made;
    return m.version == routed->version && shape.scale_bytes == 0 && shape.key() != pairs().key();
  });
}

ncclResult_t Handle::refuse(const char* function, ncclResult_t why, Opening opening, cudaStream_t stream) {
  if (device::captures(stream)) return why;  // where the call is captured, no rank waits for another
  std::array<uint8_t, kRefusal> bytes{};
  void* at = bytes.data();
  const Place place(function, group->member.shares_device != 0, stream, {});
  // Where this kind of rows has no routing yet, its choices are exchanged on the host first. What was refused may not
  // tell the kind, so any rows' routing counts.
  const bool on_device = opening == Opening::kRows && rows_on_device && rows_are_routed();
  if (on_device) MOECCL_EP_TRY(refusal.take(function, place, bytes.size(), &at));
  (void)moecclAllReduce(at, at, bytes.size(), moecclUint8, moecclMin, group->member.comm,
                        on_device ? place.moeccl_stream() : nullptr);
  if (on_device) refusal.used(place);
  return why;
}

ncclResult_t make_handle(const char* function, ncclEpHandle_t* out, const GroupPtr& group, ncclEpLayout_t layout,
                         const ncclEpHandleConfig_t* config, int top_k, const ncclEpTensor_t* memory) {
  if (out == nullptr) return fail(ncclInvalidArgument, std::string(function) + ": handle is NULL: give an address");
  *out = nullptr;
  ncclEpHandleConfig_t known;
  MOECCL_EP_TRY(take(function, "config", config, NCCL_EP_HANDLE_CONFIG_V1_SIZE, true, &known));
  MOECCL_EP_TRY(check_layout(function, *group, layout));
  MOECCL_EP_TRY(check_top_k(function, *group, layout, top_k));
  size_t align = 1;
  if (!group->low_latency() && layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
    align = std::max<size_t>(known.dispatch_output_per_expert_alignment, 1);
  if (!std::has_single_bit(align) || align > INT32_MAX)
    return fail(ncclInvalidArgument, std::string(function) + ": dispatch_output_per_expert_alignment is " +
                                         std::to_string(align) + ": give a power of two, or 0");
  std::unique_ptr<ncclEpHandle> made(new ncclEpHandle{{group, layout, top_k, static_cast<int>(align)}});
  if (memory != nullptr) MOECCL_EP_TRY(share(function, *group, memory, made->handle));
  *out = made.release();
  return ncclSuccess;
}

ncclResult_t memory_size(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config, size_t* size,
                         int top_k) {
  constexpr const char* kName = "ncclEpHandleMemSize";
  GroupPtr g;
  MOECCL_EP_TRY(group_of(kName, group, &g));
  if (size == nullptr) return fail(ncclInvalidArgument, std::string(kName) + ": size_out is NULL: give an address");
  ncclEpHandleConfig_t known;
  MOECCL_EP_TRY(take(kName, "config", config, NCCL_EP_HANDLE_CONFIG_V1_SIZE, true, &known));
  MOECCL_EP_TRY(check_layout(kName, *g, layout));
  MOECCL_EP_TRY(check_top_k(kName, *g, layout, top_k));
  *size = kHandleBytes;
  return ncclSuccess;
}

ncclResult_t free_handle(ncclEpHandle_t handle) {
  if (handle == nullptr) return ncclSuccess;
  InUse in_use;
  const GroupPtr group = handle->handle.group;
  (void)in_use.begin("ncclEpHandleDestroy", *group);  // the communicator may have ended before
  delete handle;
  return ncclSuccess;
}

Handle& handle_in(ncclEpHandle_t handle) { return handle->handle; }

ncclResult_t handle_of(const char* function, ncclEpHandle_t handle, Handle** out, InUse* in_use) {
  if (handle == nullptr)
    return fail(ncclInvalidArgument, std::string(function) + ": handle is NULL: give one of ncclEpCreateHandle");
  *out = &handle->handle;
  return in_use->begin(function, *handle->handle.group);
}

ncclResult_t update_handle(const char* function, Handle& h, const ncclEpTensor_t* topk_idx,
                           const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) {
  const Group& g = *h.group;
  const Tensors tensors(function, g.comm);
  Tensor topk;
  const auto read_choices = [&] {
    MOECCL_EP_TRY(tensors.need("topk_idx", topk_idx, &topk));
    MOECCL_EP_TRY(tensors.check(topk, {ncclInt32, ncclInt64}, {Tensors::kAny, static_cast<size_t>(h.top_k)}));
    if (topk.rows() <= g.config.max_dispatch_tokens_per_rank) return ncclSuccess;
    return tensors.refuse(topk, "has " + std::to_string(topk.rows()) + " tokens: max_dispatch_tokens_per_rank is " +
                                    std::to_string(g.config.max_dispatch_tokens_per_rank));
  };
  if (g.low_latency()) {
    MOECCL_EP_TRY(read_choices());
    if (layout_info != nullptr)
      return tensors.refuse("layout_info must be NULL in low-latency mode: give it to ncclEpDispatch");
    h.topk_idx = topk;
    return ncclSuccess;
  }
  h.routed->agreed = false;
  Counters counters;
  std::optional<Place> at;
  const auto take_over = [&] {
    ncclEpLayoutInfo_t wanted;
    MOECCL_EP_TRY(take(function, "layout_info", layout_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, true, &wanted));
    MOECCL_EP_TRY(read_choices());
    MOECCL_EP_TRY(read_counters(tensors, h, wanted, &counters));
    at.emplace(function, g.member.shares_device != 0, stream,
               std::initializer_list<const Tensor*>{&topk, &counters.expert_counts, &counters.total});
    MOECCL_EP_TRY(at->wait());
    return h.choose(topk, *at);
  };
  if (const ncclResult_t refused = take_over(); refused != ncclSuccess) {
    h.refuse_count();  // the other ranks are in theirs
    return refused;
  }
  MOECCL_EP_TRY(h.count());
  MOECCL_EP_TRY(write_counters(h, counters, *at));
  MOECCL_EP_TRY(check_overflow(function, h));
  h.routed->agreed = true;
  return ncclSuccess;
}

}  // namespace moeccl::shim::ep
