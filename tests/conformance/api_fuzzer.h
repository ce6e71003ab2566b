// SPDX-License-Identifier: Apache-2.0
// Random calls of the public interface in one process, and the conditions that must hold after each: see
// api_fuzz_test.cc.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {

inline constexpr size_t kElements = 1 << 14;  // of each buffer, in floats
inline constexpr int kWatched = 8;

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed), in_(kElements), out_(kElements), held_(kElements) {
    const char* trace = std::getenv("MOECCL_TEST_TRACE");
    trace_ = trace != nullptr ? std::fopen(trace, "w") : nullptr;
    add_calls();
  }
  Fuzzer(const Fuzzer&) = delete;
  Fuzzer& operator=(const Fuzzer&) = delete;
  ~Fuzzer() {
    if (trace_ != nullptr) std::fclose(trace_);
  }

  void run(long n_calls) {
    for (long i = 0; i < n_calls && !::testing::Test::HasFatalFailure(); ++i) {
      const auto& [name, call] = calls_[below(calls_.size())];
      if (trace_ != nullptr) std::fprintf(trace_, "%ld %s\n", i, name), std::rewind(trace_);
      name_ = name;
      call();
      if (below(4000) == 0) close_groups();
    }
    close_groups();
    destroy_all();
    EXPECT_GT(n_ok_, n_calls / 10);
    EXPECT_GT(n_refused_, n_calls / 10);
    // Calls that are always refused find little. Some always are: they lack memory for the object that they make, need
    // a device's communicator but get a CPU's, or have figures that would make them wait.
    for (const char* name :
         {"CommInitAll of many", "RoutingUpdateOnStream", "RoutingGetDeviceInfo", "CommGrow", "Profile"})
      n_ok_of_.erase(name);
    for (const auto& [name, n_ok] : n_ok_of_)
      EXPECT_TRUE(n_ok > 0 || n_calls < 100'000) << name << " never succeeded in " << n_calls << " calls";
  }

  // Runs on separate threads beside run(), and makes the calls that types.h allows there.
  void watch(uint64_t seed, const std::atomic<bool>& stop) {
    std::minstd_rand random(static_cast<uint32_t>(seed));
    while (!stop) {
      const moecclComm_t comm = watched_[random() % kWatched];
      moecclResult_t state = moecclSuccess;
      const moecclResult_t asked = moecclCommGetAsyncError(comm, &state);
      const moecclResult_t aborted = random() % 100'000 == 0 ? moecclCommAbort(comm) : moecclSuccess;
      if (std::strlen(moecclGetLastError(comm)) > 4000) ++n_bad_watched_;
      for (const moecclResult_t r : {asked, aborted})
        if (r != moecclSuccess && r != moecclInvalidArgument) ++n_bad_watched_;
      ++n_watched_;
      if (random() % 64 == 0) usleep(50);
    }
  }
  uint64_t n_watched() const { return n_watched_; }
  uint64_t n_bad_watched() const { return n_bad_watched_; }

 private:
  using Named = std::pair<const char*, std::function<void()>>;

  uint64_t below(uint64_t n) { return random_() % n; }
  bool rarely() { return below(12) == 0; }
  template <class T>
  T any_bits() {
    const uint64_t bits = random_();
    T value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  template <class H>
  H as(uint64_t bits) {
    return reinterpret_cast<H>(bits);
  }

  // Returns a handle of the list, or a value that is not a handle.
  template <class H>
  H pick(const std::vector<H>& from) {
    switch (below(16)) {
      case 0:
        return nullptr;
      case 1:
        return as<H>(random_());
      case 2:
        return as<H>(reinterpret_cast<uint64_t>(comms_.empty() ? nullptr : comms_.back()) + (uint64_t{1} << below(50)));
      case 3:
        return as<H>(reinterpret_cast<uint64_t>(streams_.empty() ? nullptr : streams_.back()));
      default:
        return from.empty() ? nullptr : from[below(from.size())];
    }
  }
  moecclComm_t comm() { return pick(comms_); }
  moecclStream_t stream() {
    if (below(3) != 0 || streams_.empty()) return nullptr;
    if (below(8) != 0) return streams_[below(streams_.size())];
    return as<moecclStream_t>(random_() << 8 | 0xC2);
  }
  size_t huge() {
    constexpr size_t kTop = size_t{1} << 63;
    const std::array<size_t, 8> sizes = {SIZE_MAX, SIZE_MAX - 8,     kTop,     kTop + 3,
                                         kTop - 1, (kTop >> 1) + 16, kTop / 3, (size_t{1} << 58) + below(100)};
    return sizes[below(sizes.size())];
  }
  size_t count() { return below(6) == 0 ? huge() : below(4) == 0 ? below(3) : below(1000); }
  int number() {
    constexpr std::array<int, 8> kOdd = {-1, 0, 1, 2, INT32_MAX, INT32_MIN, 65536, -65536};
    return below(2) == 0 ? kOdd[below(kOdd.size())] : any_bits<int>();
  }
  moecclDataType_t type() { return static_cast<moecclDataType_t>(rarely() ? number() : static_cast<int>(below(12))); }
  moecclRedOp_t op() {
    if (!ops_.empty() && below(6) == 0) return ops_[below(ops_.size())];
    return rarely() ? number() : static_cast<moecclRedOp_t>(below(5));
  }
  moecclOp_t kind() { return static_cast<moecclOp_t>(rarely() ? number() : static_cast<int>(below(MOECCL_NUM_OPS))); }
  int root() { return rarely() ? number() : 0; }
  const void* in() { return rarely() ? nullptr : in_.data() + below(8); }
  void* out() { return rarely() ? nullptr : below(6) == 0 ? in_.data() + below(8) : out_.data() + below(8); }
  template <class T>
  T* maybe(T* pointer) {
    return rarely() ? nullptr : pointer;
  }
  template <class Struct>
  void maybe_resize(Struct& s) {
    // Sizes up to 4096 stand for memory that must exist, because the library checks whether it is 0.
    if (below(8) == 0) s.size = below(2) == 0 ? below(sizeof(s) + 1) : random_() | 1ull << 32;
  }
  const char* text() {
    static const std::array<const char*, 14> kTexts = {
        "",       "auto",    "flat", "ring",   "staged", "direct",       "tree",
        "hier:1", "hier:99", "2dh",  "node:1", "????",   "node:2 gpu:4", "dc:99999999 gpu:((("};
    return rarely() ? nullptr : kTexts[below(kTexts.size())];
  }

  void note(moecclResult_t result) {
    ++(result == moecclSuccess ? n_ok_ : n_refused_);
    n_ok_of_[name_] += result == moecclSuccess ? 1 : 0;
    if (result == moecclSuccess) return;
    const std::string sentence = moecclGetLastError(nullptr);
    EXPECT_NE(result, moecclInternalError) << name_ << ": " << sentence;
    EXPECT_FALSE(sentence.empty()) << name_ << ": " << moecclGetErrorString(result);
    if (below(32) == 0) {
      EXPECT_NE(moecclGetLastError(comm()), nullptr);
    }
  }
  // Keeps a created handle. Takes it by reference, because the compiler chooses the order of the arguments, and the
  // call that creates it is one of them.
  template <class H>
  void note(moecclResult_t result, const H& made, std::vector<H>& in) {
    note(result);
    if (result == moecclSuccess && made != nullptr) in.push_back(made);
  }
  // In a group, communicators exist only after the group has ended.
  void take_joined() {
    if (depth_ > 0) return;
    for (const moecclComm_t made : joining_) {
      if (made == nullptr) continue;
      comms_.push_back(made);
      if (below(4) == 0) watched_[below(kWatched)] = made;
    }
    joining_.clear();
  }
  // Dead handles stay in their lists, so that later calls use them again.
  template <class H>
  void destroy(std::vector<H>& from, moecclResult_t (*destroy_one)(H)) {
    if (below(3) != 0) return;
    const H handle = pick(from);
    const moecclResult_t result = destroy_one(handle);
    note(result);
    if (result != moecclSuccess || handle == nullptr) return;
    EXPECT_EQ(destroy_one(handle), moecclInvalidArgument) << name_ << " succeeds twice";
  }
  template <class H>
  void trim(std::vector<H>& from, size_t most, moecclResult_t (*destroy_one)(H)) {
    while (from.size() > most) {
      const size_t i = below(from.size());
      if (destroy_one(from[i]) == moecclInvalidUsage) return;  // a group holds it
      from.erase(from.begin() + static_cast<ptrdiff_t>(i));
    }
  }

  void end_group() {
    const moecclResult_t r = moecclGroupEnd();
    note(r);
    if (depth_ == 0) {
      EXPECT_EQ(r, moecclInvalidUsage);
    } else if (depth_ > 1) {
      EXPECT_EQ(r, moecclSuccess) << "the outermost end issues";
    }
    depth_ -= depth_ > 0 ? 1 : 0;
    take_joined();
  }
  void close_groups() {
    name_ = "GroupEnd";
    while (depth_ > 0) end_group();
  }
  void destroy_all() {
    for (auto h : replacements_) (void)moecclReplaceDestroy(h);
    for (auto h : migrations_) (void)moecclMigrationDestroy(h);
    for (auto h : gradients_) (void)moecclGradientReturnDestroy(h);
    for (auto h : swaps_) (void)moecclExpertSwapDestroy(h);
    for (auto h : hybrids_) (void)moecclHybridDestroy(h);
    for (auto h : routings_) (void)moecclRoutingDestroy(h);
    for (auto h : moes_) (void)moecclMoeDestroy(h);
    for (auto h : streams_) (void)moecclStreamDestroy(h);
    for (auto h : comms_) (void)moecclCommDestroy(h);
    for (auto h : pairs_) (void)moecclCommDestroy(h);
    for (auto h : solvers_) (void)moecclSampleSolverDestroy(h);
    for (void* p : memory_) (void)moecclMemFree(p);
  }

  moecclConfig_t config() {
    moecclConfig_t c = MOECCL_CONFIG_INIT;
    c.staging_bytes = rarely() ? random_() : 1 << 17;
    c.timeout_ms = 200;
    c.init_timeout_ms = 2000;
    if (rarely()) c.pace = number();
    if (rarely()) c.topology = text();
    if (rarely()) c.priority = number();
    if (rarely()) c.deterministic = static_cast<int32_t>(below(3));
    maybe_resize(c);
    return c;
  }
  moecclMoeConfig_t layer() {
    moecclMoeConfig_t l = MOECCL_MOE_CONFIG_INIT;
    l.hidden_bytes = rarely() ? huge() : 64;
    l.type = below(3) == 0 ? type() : moecclFloat32;
    l.top_k = rarely() ? number() : 2;
    l.n_experts = rarely() ? number() : 8;
    l.max_tokens = rarely() ? count() : 16;
    l.layout = static_cast<moecclMoeLayout_t>(rarely() ? number() : static_cast<int>(below(2)));
    // The rows of any routing of 16 tokens must fit the buffers.
    if (rarely()) l.align_rows = below(2) == 0 ? static_cast<int32_t>(below(9)) : -1 - static_cast<int32_t>(below(9));
    if (rarely()) l.capacity = number();
    if (rarely()) l.memory_cap_bytes = random_();
    if (below(3) == 0) l.scale_bytes = below(8) != 0 ? 8 : huge();
    if (rarely()) l.algorithm = text();
    maybe_resize(l);
    return l;
  }
  // The program's part of the fused calls, which sometimes fails.
  static int update(void* context, int, size_t, size_t) { return static_cast<Fuzzer*>(context)->rarely() ? 1 : 0; }
  static int use(void* context, size_t, size_t, const void*) { return static_cast<Fuzzer*>(context)->rarely() ? 1 : 0; }
  moecclExpertUse_t expert_use() {
    moecclExpertUse_t u = MOECCL_EXPERT_USE_INIT;
    u.use = rarely() ? nullptr : use;
    u.context = this;
    if (rarely()) u.first = count();
    if (rarely()) u.count = count();
    if (rarely()) u.row = count();
    maybe_resize(u);
    return u;
  }
  moecclPlacement_t placement() {
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    for (size_t i = 0; i < slots_.size(); ++i) slots_[i] = rarely() ? number() : static_cast<int32_t>(below(4));
    p.n_experts = rarely() ? std::min(number(), 16) : 4;
    p.slots_per_rank = rarely() ? number() % 9 : 4;
    p.slot_expert = maybe(slots_.data());
    if (rarely()) p.size = below(sizeof(p) + 1);
    return p;
  }
  const int32_t* choices() {
    for (int32_t& c : choices_) c = below(60) == 0 ? number() : static_cast<int32_t>(below(8));
    for (size_t i = 0; i + 1 < choices_.size(); i += 2)
      if (below(30) != 0 && choices_[i] == choices_[i + 1]) choices_[i + 1] = (choices_[i] % 8 + 1) % 8;
    return maybe(choices_.data());
  }

  void add(const char* name, std::function<void()> call, int weight = 1) {
    for (int i = 0; i < weight; ++i) calls_.emplace_back(name, call);
  }
  void add_calls();
  void add_communicators();
  void add_operations();
  void add_layers();
  void add_experts();
  void add_questions();
  void add_elastic();
  void add_solvers();
  void add_sample_solvers();
  void add_swap_solvers();
  void add_replica_solvers();
  void add_domain_solvers();
  void add_chunk_solvers();
  int32_t extent(int most);
  double real();
  const int32_t* ints(size_t which, int32_t n);
  const double* reals(size_t which);
  void fork_child();
  void drive_pair();

  std::mt19937_64 random_;
  std::vector<Named> calls_;
  const char* name_ = "";
  FILE* trace_ = nullptr;
  long n_ok_ = 0, n_refused_ = 0;
  std::map<std::string, long> n_ok_of_;  // of each call
  bool is_child_ = false;
  int depth_ = 0;  // number of open groups

  std::vector<float> in_, out_, held_;
  std::array<int32_t, 64> choices_{};
  std::array<int32_t, 64> slots_{};  // of 8 ranks with 8 slots each
  std::vector<moecclComm_t> comms_, pairs_;
  std::deque<moecclComm_t> joining_;  // written when the group ends
  std::vector<moecclStream_t> streams_;
  std::vector<moecclMoe_t> moes_;
  std::vector<moecclRouting_t> routings_;
  std::vector<moecclHybrid_t> hybrids_;
  std::vector<moecclMigration_t> migrations_;
  std::vector<moecclGradientReturn_t> gradients_;
  std::vector<moecclExpertSwap_t> swaps_;
  std::vector<moecclReplacement_t> replacements_;
  std::vector<moecclSampleSolver_t> solvers_;
  std::map<moecclMoe_t, moecclRouting_t> routing_of_;  // the last one
  std::map<moecclReplacement_t, moecclMoe_t> layer_of_;
  std::vector<moecclRedOp_t> ops_;
  std::vector<void*> memory_;
  static constexpr size_t kArray = 4096;  // larger than any accepted problem of these sizes
  std::array<std::vector<int32_t>, 6> ints_;
  std::array<std::vector<double>, 8> reals_;
  std::vector<std::pair<moecclComm_t, void*>> registrations_;

  std::array<std::atomic<moecclComm_t>, kWatched> watched_{};
  std::atomic<uint64_t> n_watched_{0}, n_bad_watched_{0};
};

}  // namespace moeccl::testing
