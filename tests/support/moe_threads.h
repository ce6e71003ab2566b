// SPDX-License-Identifier: Apache-2.0
// A MoeHost for n ranks that are threads of the test. The interpreter runs the plans.
#pragma once

#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/moe/moe_host.h"
#include "tests/support/interpreter.h"

namespace moeccl::test {

// The ranks' meeting point. Each exchange publishes a pointer per rank and ends when all have read.
class MeetingPoint {
 public:
  explicit MeetingPoint(uint32_t n) : slots(n), n_(n) {}
  void meet() {
    std::unique_lock lock(mutex_);
    const uint64_t round = round_;
    if (++arrived_ == n_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    // A rank that leaves early would block the others here for ever.
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return round_ != round; })) {
      ADD_FAILURE() << "ranks do not take part in the same exchanges";
      std::abort();
    }
  }
  struct Slot {
    const void* data = nullptr;
    const size_t* bytes = nullptr;
    const exec::Operation* run = nullptr;
  };
  std::vector<Slot> slots;

 private:
  uint32_t n_, arrived_ = 0;
  uint64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct HostTraits {
  plan::LevelTree tree;
  bool deterministic = false;
  uint64_t staging = 1 << 20;
};

// A host without streams and CUDA memory, whose calls never fail.
class PlainHost : public comm::MoeHost {
 public:
  std::shared_ptr<const plan::Profile> profile() const override { return std::make_shared<const plan::Profile>(); }
  bool paced() const override { return false; }
  uint64_t next_number() override { return 0; }
  Result<Place> place(const RowBuffers&, comm::Stream*) override { return Place{}; }
  void break_off(const Status&) override {}
  exec::StreamEngine* engine_for(const void*) override { return nullptr; }
  exec::PersistentKernel* kernel() override { return nullptr; }
  bool is_device_memory(const void*) const override { return false; }
  Status check_reach(std::initializer_list<const void*>) const override { return {}; }
  Result<OnStream> on_stream(comm::Stream*) override { return error(moecclUnsupported, "no CUDA memory"); }
  Status all_gather_on(const void*, void*, size_t, comm::Stream*) override {
    return error(moecclUnsupported, "no CUDA memory");
  }
  Status needs_host(comm::Stream*) override { return {}; }
  Status usable() override { return {}; }
  Status all_to_all(const void* send, size_t bytes, void* recv) override {
    const std::vector<size_t> sizes(n_ranks(), bytes);
    return all_to_all_v(send, sizes.data(), recv, sizes.data());
  }
  void wait_idle() override {}
  Result<bool> on_device(const char*, std::initializer_list<Buffer>) const override { return false; }
  Status with_kernels(bool, const WithKernels& body) override { return body(kernels::best()), Status(); }
};

class ThreadHost final : public PlainHost {
 public:
  ThreadHost(MeetingPoint& point, const HostTraits& traits, uint32_t rank)
      : point_(point), traits_(traits), rank_(rank) {}
  uint32_t rank() const override { return rank_; }
  uint32_t n_ranks() const override { return traits_.tree.n_ranks; }
  const plan::LevelTree& tree() const override { return traits_.tree; }
  bool deterministic() const override { return traits_.deterministic; }
  uint64_t staging_bytes() const override { return traits_.staging; }

  Status all_gather(const void* mine, size_t bytes, void* all) override {
    point_.slots[rank_].data = mine;
    point_.meet();
    for (uint32_t r = 0; r < n_ranks() && bytes > 0; ++r)
      std::memcpy(static_cast<std::byte*>(all) + r * bytes, point_.slots[r].data, bytes);
    point_.meet();
    return {};
  }
  Status all_to_all_v(const void* send, const size_t* send_bytes, void* recv, const size_t* recv_bytes) override {
    point_.slots[rank_].data = send;
    point_.slots[rank_].bytes = send_bytes;
    point_.meet();
    auto* to = static_cast<std::byte*>(recv);
    for (uint32_t r = 0; r < n_ranks(); ++r) {
      const auto* from = static_cast<const std::byte*>(point_.slots[r].data);
      for (uint32_t p = 0; p < rank_; ++p) from += point_.slots[r].bytes[p];
      EXPECT_EQ(point_.slots[r].bytes[rank_], recv_bytes[r]) << r << " to " << rank_;
      if (recv_bytes[r] > 0) std::memcpy(to, from, recv_bytes[r]);
      to += recv_bytes[r];
    }
    point_.meet();
    return {};
  }
  Status run(std::unique_ptr<exec::Operation> op, const Place&, bool*) override {
    point_.slots[rank_].run = op.get();
    point_.meet();
    if (rank_ == 0) interpret();
    point_.meet();
    op->measured->ns = 1000;
    return {};
  }

 private:
  void interpret() {
    std::vector<plan::Program> programs;
    std::vector<plan::Binding> bindings;
    std::vector<RankBuffers> buffers;
    const exec::Operation& first = *point_.slots[0].run;
    for (const MeetingPoint::Slot& s : point_.slots) {
      EXPECT_EQ(s.run->signature.plan, first.signature.plan);
      EXPECT_EQ(s.run->signature.type, first.signature.type);
      programs.push_back(*s.run->choice.program);
      bindings.push_back(s.run->binding);
      buffers.push_back({static_cast<const std::byte*>(s.run->input), static_cast<std::byte*>(s.run->output)});
      EXPECT_LE(uint64_t{programs.back().n_slots} * programs.back().depth * bindings.back().slot_elements *
                    bindings.back().element_bytes,
                traits_.staging);
    }
    Interpreter(programs, bindings, buffers, first.signature.type, first.grouped).run(seed_++);
  }

  MeetingPoint& point_;
  const HostTraits& traits_;
  uint32_t rank_, seed_ = 1;
};

inline void on_all_ranks(const HostTraits& traits, const std::function<void(comm::MoeHost&)>& body) {
  MeetingPoint point(traits.tree.n_ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < traits.tree.n_ranks; ++r)
    threads.emplace_back([&, r] {
      ThreadHost host(point, traits, r);
      body(host);
    });
  for (std::thread& t : threads) t.join();
}

}  // namespace moeccl::test
