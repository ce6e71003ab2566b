// SPDX-License-Identifier: Apache-2.0
// NCCL EP's binary interface, and what its functions refuse.
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include "tests/shim/ep_ranks.h"

namespace moeccl::testing {
namespace {

// The boundaries that API versions 1 and 2 froze.
#define ENDS_AT(type, field, at) static_assert(offsetof(type, field) + sizeof(type::field) == (at))
static_assert(sizeof(ncclEpTensor_t) == 48 && offsetof(ncclEpTensor_t, sizes) == 40);
static_assert(offsetof(ncclEpTensor_t, ndim) == 8 && offsetof(ncclEpTensor_t, datatype) == 12);
static_assert(offsetof(ncclEpTensor_t, win_hdl) == 24 && offsetof(ncclEpTensor_t, win_offset) == 32);
static_assert(sizeof(ncclEpTensorAllocConfig_t) == 8 && sizeof(ncclEpCompleteConfig_t) == 8);
static_assert(sizeof(ncclEpGroupConfig_t) == 112 && sizeof(ncclEpAllocConfig_t) == 24);
static_assert(offsetof(ncclEpGroupConfig_t, algorithm) == 12 && offsetof(ncclEpGroupConfig_t, max_token_bytes) == 28);
static_assert(offsetof(ncclEpGroupConfig_t, rdma_buffer_size) == 32 && offsetof(ncclEpGroupConfig_t, alloc) == 56);
static_assert(offsetof(ncclEpGroupConfig_t, enable_mask) == 80 && offsetof(ncclEpGroupConfig_t, num_topk) == 104);
ENDS_AT(ncclEpGroupConfig_t, timeout_ns, NCCL_EP_GROUP_CONFIG_V1_SIZE);
ENDS_AT(ncclEpGroupConfig_t, padding_v2, 112);
ENDS_AT(ncclEpLayoutInfo_t, recv_total_counter, NCCL_EP_LAYOUT_INFO_V1_SIZE);
ENDS_AT(ncclEpLayoutInfo_t, padding_v2, 48);
ENDS_AT(ncclEpDispatchInputs_t, scales, NCCL_EP_DISPATCH_INPUTS_V1_SIZE);
ENDS_AT(ncclEpDispatchOutputs_t, topk_idx, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE);
ENDS_AT(ncclEpCombineInputs_t, topk_weights, NCCL_EP_COMBINE_INPUTS_V1_SIZE);
ENDS_AT(ncclEpCombineInputs_t, scales, 32);
ENDS_AT(ncclEpCombineOutputs_t, topk_weights, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE);
ENDS_AT(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, NCCL_EP_HANDLE_CONFIG_V1_SIZE);
ENDS_AT(ncclEpDispatchConfig_t, pass_direction, NCCL_EP_DISPATCH_CONFIG_V1_SIZE);
ENDS_AT(ncclEpDispatchConfig_t, quant_recipe, 24);
ENDS_AT(ncclEpCombineConfig_t, pass_direction, NCCL_EP_COMBINE_CONFIG_V1_SIZE);
ENDS_AT(ncclEpCombineConfig_t, quant_recipe, 20);
static_assert(sizeof(ncclEpDispatchConfig_t) == 24 && sizeof(ncclEpCombineConfig_t) == 20);

// Runs a shell's command and returns all that it writes.
std::string shell(const std::string& command) {
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  if (pipe == nullptr) return "no shell";
  std::string text;
  for (char buffer[1024]; fgets(buffer, sizeof buffer, pipe) != nullptr;) text += buffer;
  pclose(pipe);
  return text;
}
// Choices in the host's memory, also where there is a device.
struct HostChoices {
  HostChoices(const EpStep& step, int rank) : values(step.experts(rank)) {
    sizes[0] = step.tokens(rank), sizes[1] = static_cast<size_t>(step.top_k);
    tensor = {sizeof tensor, NCCL_EP_TENSOR_MAGIC, 2, ncclInt64, values.data(), nullptr, 0, sizes};
  }
  std::vector<int64_t> values;
  size_t sizes[2];
  ncclEpTensor_t tensor;
};
std::string library() {
  const char* file = std::getenv("MOECCL_TEST_EP");
  return file != nullptr ? file : "";
}

// Shells and launchers are preloaded with it, too.
TEST(EpRules, AProgramWithoutCallsHasNoMoecclInside) {
  constexpr const char* kScript = R"(python3 -c '
import ctypes
text = open("/proc/self/maps").read()
print("libmoeccl-nccl-ep.so" in text, "libmoeccl.so" in text)
ep = ctypes.CDLL("libnccl_ep.so.0")
v = ctypes.c_int()
print(ep.ncclEpGetVersion(ctypes.byref(v)), v.value)
')";
  EXPECT_EQ(shell("LD_PRELOAD=" + library() + " " + kScript), "True False\n0 100\n");
  const std::string alone =
      shell("d=$(mktemp -d); cp " + library() + " $d; LD_PRELOAD=$d/libmoeccl-nccl-ep.so " + kScript + "; rm -r $d");
  EXPECT_NE(alone.find("cannot serve NCCL EP's calls"), std::string::npos) << alone;
  EXPECT_NE(alone.find("\n2 0\n"), std::string::npos) << alone;
}

TEST(EpRules, TheLibraryExportsExactlyTheList) {
  const char* list = std::getenv("MOECCL_TEST_EP_SYMBOLS");
  ASSERT_NE(list, nullptr);
  std::istringstream nm(shell("nm -D --defined-only " + library() + " | awk '{print $3}'"));
  std::set<std::string> exported, wanted;
  for (std::string name; std::getline(nm, name);) exported.insert(name);
  std::ifstream names(list);
  for (std::string name; std::getline(names, name);) wanted.insert(name);
  EXPECT_EQ(wanted.size(), 18u);
  EXPECT_EQ(exported, wanted);
}

TEST(EpRules, TensorsAndTheVersion) {
  in_processes(1, [](int) {
    int version = 0;
    EXPECT_NCCL(ncclEpGetVersion(&version));
    EXPECT_EQ(version, 100);
    EXPECT_EQ(ncclEpGetVersion(nullptr), ncclInvalidArgument);
    size_t sizes[2] = {3, 5};
    ncclEpTensor_t* t = nullptr;
    ASSERT_NCCL(ncclEpTensorAlloc(&t, 2, ncclBfloat16, sizes, nullptr));
    sizes[0] = 9;
    EXPECT_EQ(t->ndim, 2u);
    EXPECT_EQ(t->datatype, ncclBfloat16);
    EXPECT_EQ(t->sizes[0], 3u) << "the sizes are a copy";
    EXPECT_EQ(t->data, nullptr);
    size_t* const own = t->sizes;
    t->sizes = sizes;
    EXPECT_EQ(ncclEpTensorDestroy(t), ncclInvalidArgument) << "its sizes were replaced";
    t->sizes = own;
    EXPECT_NCCL(ncclEpTensorDestroy(t));
    EXPECT_NCCL(ncclEpTensorDestroy(nullptr));
    ncclEpTensor_t stack{sizeof stack, NCCL_EP_TENSOR_MAGIC, 2, ncclInt8, nullptr, nullptr, 0, sizes};
    EXPECT_EQ(ncclEpTensorDestroy(&stack), ncclInvalidArgument) << "not one of ncclEpTensorAlloc";
    EXPECT_EQ(ncclEpTensorAlloc(&t, 0, ncclInt8, sizes, nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclEpTensorAlloc(&t, 1, ncclInt8, nullptr, nullptr), ncclInvalidArgument);
    ncclEpTensorAllocConfig_t config{8, 1};
    EXPECT_EQ(ncclEpTensorAlloc(&t, 1, ncclInt8, sizes, &config), ncclInvalidArgument) << "its magic is wrong";
  });
}

TEST(EpRules, GroupsCheckTheirConfig) {
  in_processes(1, [](int) {
    EpMemory memory;
    const EpStep step{.n_ranks = 1};
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    const auto good = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    EXPECT_NE(ncclEpCreateGroup(&group, reinterpret_cast<ncclComm_t>(&comm), &good), ncclSuccess) << "no communicator";
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, nullptr), "config is NULL");
    auto c = good;
    c.size = NCCL_EP_GROUP_CONFIG_V1_SIZE - 1;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c), "size");
    c = good;
    c.magic = 5;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c), "magic");
    c = good;
    c.max_token_bytes = 20;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c), "multiple of 16");
    c = good;
    c.max_recv_tokens_per_rank = 1;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c), "max_recv_tokens_per_rank");
    c = good;
    c.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c), "NCCL_EP_OVERFLOW_DROP");
    c = good;
    c.alloc.free_fn = [](void*, void*) { return 0; };
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpCreateGroup(&group, comm, &c), "alloc");
    // A program of version 1 has a shorter struct, and one of a later version a longer one.
    c = good;
    c.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
    c.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(99);  // beyond what it has
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &c));
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    struct {
      ncclEpGroupConfig_t known;
      char unknown[64];
    } later{good, {1}};
    later.known.size = sizeof later;
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &later.known));
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpMaskQuery(group, nullptr, nullptr), "enable_mask");
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    c = good;
    c.enable_mask = 1;
    int mask = 0;
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &c));
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpMaskUpdate(group, &mask, nullptr), "NCCL_EP_ALGO_LOW_LATENCY");
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    EXPECT_NCCL(ncclEpGroupDestroy(nullptr));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Ranks whose configs differ all hear of it.
TEST(EpRules, RanksAgreeOnTheConfig) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    const ncclUniqueId id = meet(board, rank);
    EpMemory memory;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    auto c = EpRank::config(step, NCCL_EP_ALGO_LOW_LATENCY);
    c.num_experts = rank == 0 ? 8 : 16;
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCreateGroup(&group, comm, &c),
                   "num_experts is 8 on rank 0 and 16 on rank 1");
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// The communicator stays while a call works on it. Afterwards, as while it is suspended, it is refused.
TEST(EpRules, AnotherThreadMayAbortTheCommunicator) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    const EpStep step;
    const EpMemory memory;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    ncclEpHandle_t h = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    const auto config = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &config));
    ASSERT_NCCL(ncclEpInitHandle(&h, group, NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, nullptr));
    HostChoices topk(step, rank);
    ASSERT_NCCL(ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr));
    if (rank == 0) {
      ASSERT_NCCL(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
      EXPECT_REFUSED(ncclInvalidUsage, ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr), "suspended");
      ASSERT_NCCL(ncclCommResume(comm));
      std::atomic<bool> ended{false};
      std::thread caller([&] {
        EXPECT_NE(ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr), ncclSuccess);
        ended = true;
      });
      usleep(100'000);
      EXPECT_FALSE(ended);
      EXPECT_NCCL(ncclCommAbort(comm));
      caller.join();
      EXPECT_REFUSED(ncclInvalidArgument, ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr),
                     "ncclEpUpdateHandle: comm is not a live communicator");
      board->counters[0].store(1);
    }
    while (board->counters[0].load() == 0) usleep(1000);  // rank 1 does not come
    EXPECT_NCCL(ncclEpHandleDestroy(h));
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    if (rank == 1) ncclCommDestroy(comm);
  });
}

// A thread that has not used CUDA yet gets the communicator's device.
TEST(EpRules, AnyThreadMayCall) {
  in_processes(1, [](int) {
    EpStep step;
    step.n_ranks = 1;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    ncclEpHandle_t h = nullptr;
    const auto in_a_thread = [](const auto& body) { std::thread(body).join(); };
    in_a_thread([&] {
      const EpMemory memory;
      ncclUniqueId id;
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
      const auto config = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
      ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &config));
    });
    HostChoices topk(step, 0);
    in_a_thread([&] {
      EXPECT_NCCL(ncclEpCreateHandle(&h, group, NCCL_EP_LAYOUT_FLAT, &topk.tensor, nullptr, nullptr, nullptr));
    });
    in_a_thread([&] { EXPECT_NCCL(ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr)); });
    in_a_thread([&] {
      EXPECT_NCCL(ncclEpHandleDestroy(h));
      EXPECT_NCCL(ncclEpGroupDestroy(group));
      EXPECT_NCCL(ncclCommDestroy(comm));
    });
  });
}

// The program may have freed the memory of choices without a handle, so the latest of these are kept.
TEST(EpRules, OldChoicesAreForgotten) {
  both_ways(1, [](Board& board, int rank) {
    EpStep step;
    step.n_ranks = 1;
    EpRank r(board, step, rank, EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT));
    constexpr size_t kPlaces = 4200, kBytes = 256;
    EpTensor<uint8_t> memory(r.memory(), ncclUint8, {kPlaces + kBytes});
    HostChoices topk(step, 0);
    const auto init = [&](size_t place) {
      ncclEpHandle_t h = nullptr;
      size_t sizes[1] = {kBytes};
      ncclEpTensor_t at{
          sizeof at, NCCL_EP_TENSOR_MAGIC, 1, ncclUint8, static_cast<char*>(memory.data()) + place, nullptr, 0, sizes};
      EXPECT_NCCL(ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, &at));
      return h;
    };
    // Rows without memory are refused only after the choices are found.
    const auto has_choices = [&](size_t place) {
      const ncclEpHandle_t h = init(place);
      auto inputs = ep_init<ncclEpDispatchInputs_t>();
      auto outputs = ep_init<ncclEpDispatchOutputs_t>();
      const ncclResult_t refused = ncclEpDispatch(h, &inputs, &outputs, nullptr, nullptr, nullptr);
      EXPECT_TRUE(refused == ncclInvalidArgument || said().find("has no choices") != std::string::npos) << said();
      EXPECT_NCCL(ncclEpHandleDestroy(h));
      return refused == ncclInvalidArgument;
    };
    ncclEpHandle_t live = init(0), gone = init(1), late = init(2);
    for (ncclEpHandle_t h : {live, gone, late}) ASSERT_NCCL(ncclEpUpdateHandle(h, &topk.tensor, nullptr, nullptr));
    EXPECT_NCCL(ncclEpHandleDestroy(gone));
    EXPECT_NCCL(ncclEpHandleDestroy(late));
    for (size_t place = 3; place < 4000; ++place) EXPECT_NCCL(ncclEpHandleDestroy(init(place)));
    EXPECT_TRUE(has_choices(2));
    for (size_t place = 4000; place < kPlaces; ++place) EXPECT_NCCL(ncclEpHandleDestroy(init(place)));
    EXPECT_TRUE(has_choices(0)) << "its handle is there";
    EXPECT_FALSE(has_choices(1));
    EXPECT_TRUE(has_choices(2)) << "a later handle used it";
    EXPECT_NCCL(ncclEpHandleDestroy(live));
  });
}

TEST(EpRules, HandlesAndCallsAreChecked) {
  both_ways(1, [](Board& board, int rank) {
    EpStep step;
    step.n_ranks = 1;
    auto config = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    config.max_recv_tokens_per_rank = static_cast<unsigned>(step.most);
    EpRank r(board, step, rank, config);
    const size_t n = step.tokens(0), k = static_cast<size_t>(step.top_k);
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {n, k}), idx(r.memory(), ncclInt64, {step.most, k});
    EpTensor<float> in(r.memory(), ncclFloat32, {n, step.hidden}),
        out(r.memory(), ncclFloat32, {step.most, step.hidden});
    EpTensor<float> weights(r.memory(), ncclFloat32, {n, k}), got(r.memory(), ncclFloat32, {step.most, k});
    topk.put(step.experts(0));
    ncclEpHandle_t h = nullptr;
    EXPECT_REFUSED(ncclInvalidArgument,
                   ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_RANK_MAJOR, nullptr, step.top_k, nullptr), "layout");
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, -1, nullptr),
                   "num_topk");
    auto align = ep_init<ncclEpHandleConfig_t>();
    align.dispatch_output_per_expert_alignment = 12;
    EXPECT_REFUSED(ncclInvalidArgument,
                   ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, &align, step.top_k, nullptr),
                   "power of two");
    ASSERT_NCCL(ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, nullptr));
    auto inputs = ep_init<ncclEpDispatchInputs_t>();
    auto outputs = ep_init<ncclEpDispatchOutputs_t>();
    auto how = ep_init<ncclEpDispatchConfig_t>();
    inputs.tokens = in.get(), inputs.topk_weights = weights.get();
    outputs.tokens = out.get(), outputs.topk_weights = got.get(), outputs.topk_idx = idx.get();
    const auto dispatch = [&] { return ncclEpDispatch(h, &inputs, &outputs, nullptr, &how, r.stream()); };
    EXPECT_REFUSED(ncclInvalidUsage, dispatch(), "ncclEpUpdateHandle");
    ASSERT_NCCL(ncclEpUpdateHandle(h, topk.get(), nullptr, r.stream()));
    inputs.topk_weights = nullptr;
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "inputs->topk_weights is NULL");
    inputs.topk_weights = weights.get();
    how.pass_direction = NCCL_EP_BWD_PASS;
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "must be NULL in the backward pass");
    how.pass_direction = static_cast<ncclEpPassDir_t>(7);
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "pass_direction is 7");
    how.pass_direction = NCCL_EP_FWD_PASS;
    auto info = ep_init<ncclEpLayoutInfo_t>();
    info.recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(7);
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpDispatch(h, &inputs, &outputs, &info, &how, r.stream()),
                   "recv_topk_idx_kind is 7");
    how.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "NCCL_EP_DISP_QUANT_FWD");
    how.quant_recipe = NCCL_EP_DISP_QUANT_NONE;
    outputs.tokens->magic = 0;
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "not initialised");
    outputs.tokens->magic = NCCL_EP_TENSOR_MAGIC;
    EpTensor<float> small(r.memory(), ncclFloat32, {step.most - 1, step.hidden});
    outputs.tokens = small.get();
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "max_recv_tokens_per_rank");
    outputs.tokens = out.get();
    EpTensor<float> none(r.memory(), ncclFloat32, {0, k});
    EpTensor<int64_t> no_idx(r.memory(), ncclInt64, {0, k});
    outputs.topk_weights = none.get(), outputs.topk_idx = no_idx.get();
    EXPECT_REFUSED(ncclInvalidArgument, dispatch(), "both empty");
    outputs.topk_weights = got.get(), outputs.topk_idx = idx.get();
    EXPECT_NCCL(dispatch());
    auto back = ep_init<ncclEpCombineInputs_t>();
    auto sums = ep_init<ncclEpCombineOutputs_t>();
    auto coded = ep_init<ncclEpCombineConfig_t>();
    back.tokens = out.get(), sums.tokens = in.get();
    coded.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpCombine(h, &back, &sums, &coded, r.stream()), "NCCL_EP_COMB_QUANT_NONE");
    coded.pass_direction = static_cast<ncclEpPassDir_t>(7);
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCombine(h, &back, &sums, &coded, r.stream()), "pass_direction is 7");
    std::vector<int64_t> far = step.experts(0);
    far[1] = 4711;
    topk.put(far);
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpUpdateHandle(h, topk.get(), nullptr, r.stream()), "4711");
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpCombine(nullptr, &back, &sums, nullptr, r.stream()), "handle is NULL");
    EXPECT_NCCL(ncclEpHandleDestroy(h));
    EXPECT_NCCL(ncclEpHandleDestroy(nullptr));
  });
}

// What the host reads cannot be part of a graph.
TEST(EpRules, ACaptureIsRefused) {
  both_ways(1, [](Board& board, int rank) {
    EpStep step;
    step.n_ranks = 1;
    EpRank r(board, step, rank, EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT));
    if (!r.memory().device().ok()) return;
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {step.tokens(0), static_cast<size_t>(step.top_k)});
    topk.put(step.experts(0));
    ncclEpHandle_t h = nullptr;
    ASSERT_NCCL(ncclEpInitHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, nullptr, step.top_k, nullptr));
    r.memory().device().begin_capture(r.stream());
    EXPECT_REFUSED(ncclInvalidUsage, ncclEpUpdateHandle(h, topk.get(), nullptr, r.stream()), "captured");
    (void)r.memory().device().end_capture(r.stream());
    ASSERT_NCCL(ncclEpUpdateHandle(h, topk.get(), nullptr, r.stream()));
    EXPECT_NCCL(ncclEpHandleDestroy(h));
  });
}

// Calls on what the program has destroyed too early are errors, and destroying the rest is none.
TEST(EpRules, TheCommunicatorMayEndFirst) {
  in_processes(1, [](int) {
    EpMemory memory;
    const EpStep step{.n_ranks = 1};
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclEpGroup_t group = nullptr;
    ncclEpHandle_t h = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    const auto config = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    ASSERT_NCCL(ncclEpCreateGroup(&group, comm, &config));
    EpTensor<int64_t> topk(memory, ncclInt64, {step.tokens(0), static_cast<size_t>(step.top_k)});
    topk.put(step.experts(0));
    ASSERT_NCCL(ncclEpCreateHandle(&h, group, NCCL_EP_LAYOUT_FLAT, topk.get(), nullptr, nullptr, memory.stream()));
    ASSERT_NCCL(ncclCommDestroy(comm));
    EXPECT_NE(ncclEpUpdateHandle(h, topk.get(), nullptr, memory.stream()), ncclSuccess);
    EXPECT_NCCL(ncclEpGroupDestroy(group));
    EXPECT_NE(ncclEpUpdateHandle(h, topk.get(), nullptr, memory.stream()), ncclSuccess);
    EXPECT_NCCL(ncclEpHandleDestroy(h));
  });
}

// A tensor may name a window of the communicator instead of an address.
TEST(EpRules, TensorsMayBeInWindows) {
  both_ways(2, [](Board& board, int rank) {
    const EpStep step;
    auto config = EpRank::config(step, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    EpRank r(board, step, rank, config);
    const size_t n = step.tokens(rank), k = static_cast<size_t>(step.top_k), rows = step.rows(rank).size();
    EpTensor<int64_t> topk(r.memory(), ncclInt64, {n, k}), idx(r.memory(), ncclInt64, {rows, k});
    EpTensor<float> in(r.memory(), ncclFloat32, {n, step.hidden}),
        out(r.memory(), ncclFloat32, {rows + 1, step.hidden});
    EpTensor<float> weights(r.memory(), ncclFloat32, {n, k}), got(r.memory(), ncclFloat32, {rows, k});
    topk.put(step.experts(rank));
    in.put(step.values(rank));
    ncclWindow_t window = nullptr;
    const size_t row_bytes = step.hidden * sizeof(float);
    ASSERT_NCCL(ncclCommWindowRegister(r.comm(), out.data(), (rows + 1) * row_bytes, &window, NCCL_WIN_DEFAULT));
    ncclEpHandle_t h = nullptr;
    ASSERT_NCCL(ncclEpCreateHandle(&h, r.group(), NCCL_EP_LAYOUT_FLAT, topk.get(), nullptr, nullptr, r.stream()));
    auto inputs = ep_init<ncclEpDispatchInputs_t>();
    auto outputs = ep_init<ncclEpDispatchOutputs_t>();
    inputs.tokens = in.get(), inputs.topk_weights = weights.get();
    outputs.topk_weights = got.get(), outputs.topk_idx = idx.get();
    size_t sizes[2] = {rows, step.hidden};
    ncclEpTensor_t second{sizeof second, NCCL_EP_TENSOR_MAGIC, 2, ncclFloat32, nullptr, window, row_bytes, sizes};
    outputs.tokens = out.get();
    EXPECT_REFUSED(ncclInvalidArgument, ncclEpDispatch(h, &inputs, &outputs, nullptr, nullptr, r.stream()),
                   "zero_copy");
    outputs.tokens = &second;
    ASSERT_NCCL(ncclEpDispatch(h, &inputs, &outputs, nullptr, nullptr, r.stream()));
    const std::vector<float> values = out.values();
    for (size_t row = 0; row < rows; ++row) {
      const EpStep::Choice c = step.rows(rank)[row][0];
      ASSERT_EQ(values[(row + 1) * step.hidden], step.value(c.source, c.token, 0)) << "row " << row;
    }
    EXPECT_NCCL(ncclEpHandleDestroy(h));
    EXPECT_NCCL(ncclCommWindowDeregister(r.comm(), window));
  });
}

// With another library in NCCL's place, a group says what is missing.
TEST(EpRules, AForeignCommunicatorIsNamed) {
  char self[4096] = {};
  ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
  const std::string text = shell("LD_PRELOAD=" + library() + " " + self +
                                 " --gtest_also_run_disabled_tests --gtest_filter=EpRules.DISABLED_WithoutTheShim");
  EXPECT_NE(text.find("not of MoECCL's NCCL shim"), std::string::npos) << text;
  EXPECT_NE(text.find("[  PASSED  ] 1 test"), std::string::npos) << text;
}
TEST(EpRules, DISABLED_WithoutTheShim) {
  auto config = EpRank::config(EpStep{}, NCCL_EP_ALGO_LOW_LATENCY);
  ncclEpGroup_t group = nullptr;
  int something = 0;
  EXPECT_EQ(ncclEpCreateGroup(&group, reinterpret_cast<ncclComm_t>(&something), &config), ncclInvalidUsage);
  EXPECT_EQ(group, nullptr);
}

}  // namespace
}  // namespace moeccl::testing
