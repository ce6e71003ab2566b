// SPDX-License-Identifier: Apache-2.0
// Sample placement on a thread of its own, with a deadline (NetMoE Algorithm 1, line 9).
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "src/api/convert.h"
#include "src/api/solve_args.h"
#include "src/driver/thread.h"
#include "src/solve/sample.h"

using namespace moeccl;

namespace {

// A problem together with copies of the arrays that it points to.
struct OwnedProblem {
  moecclSampleProblem_t problem{};
  std::vector<int32_t> arrays[6];
  std::vector<double> figures[2];

  explicit OwnedProblem(const moecclSampleProblem_t& p) : problem(p) {
    const auto items = static_cast<size_t>(p.n_samples), counts = items * static_cast<size_t>(p.n_experts);
    problem.num_gather = keep(0, p.num_gather, counts);
    problem.num_scatter = keep(1, p.num_scatter, counts);
    problem.expert_device = keep(2, p.expert_device, static_cast<size_t>(p.n_experts));
    problem.device_node = keep(3, p.device_node, static_cast<size_t>(p.n_devices));
    problem.current = keep(4, p.current, items);
    const auto inner = static_cast<size_t>(p.n_inner);
    problem.inner_group = keep(5, p.inner_group, inner * static_cast<size_t>(p.n_devices));
    figures[0].assign(p.inner_alpha_us, p.inner_alpha_us + inner);
    figures[1].assign(p.inner_beta_us, p.inner_beta_us + inner);
    problem.inner_alpha_us = figures[0].data();
    problem.inner_beta_us = figures[1].data();
  }
  OwnedProblem(const OwnedProblem&) = delete;
  OwnedProblem& operator=(const OwnedProblem&) = delete;

 private:
  const int32_t* keep(int at, const int32_t* from, size_t n) {
    if (from == nullptr) return nullptr;
    arrays[at].assign(from, from + n);
    arrays[at].push_back(0);  // never NULL, even when empty
    return arrays[at].data();
  }
};

class BackgroundSolver {
 public:
  static constexpr api::Words kWords{"solver", "solver", "moecclSampleSolverCreate"};
  BackgroundSolver() : thread_(driver::started_thread("moeccl-solve", [this] { run(); })) {}
  ~BackgroundSolver() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  BackgroundSolver(const BackgroundSolver&) = delete;
  BackgroundSolver& operator=(const BackgroundSolver&) = delete;

  void submit(const moecclSampleProblem_t& p) {
    auto owned = std::make_shared<const OwnedProblem>(p);
    {
      const std::lock_guard lock(mutex_);
      latest_ = pending_ = std::move(owned);
      ++submitted_;
      failure_ = {};  // of an earlier problem
    }
    wake_.notify_all();
  }

  Status fetch(double deadline_us, int32_t* placement, moecclSampleAnswer_t* answer, moecclAnswerSource_t* source) {
    std::unique_lock lock(mutex_);
    if (latest_ == nullptr)
      return error(moecclInvalidUsage, "nothing was submitted: call moecclSampleSolverSubmit first");
    const auto ready = [this] { return handled_ == submitted_ || !failure_.ok(); };
    if (deadline_us < 0) {
      done_.wait(lock, ready);
    } else {
      done_.wait_for(lock, std::chrono::duration<double, std::micro>(std::min(deadline_us, 1e12)), ready);
    }
    if (!failure_.ok()) return std::exchange(failure_, Status());
    const bool fresh = solved_ == submitted_;
    const auto problem = latest_;
    const std::vector<int32_t> last = last_;
    moecclSampleAnswer_t made = last_answer_;
    lock.unlock();
    if (fresh) {
      std::copy(last.begin(), last.end(), placement);
    } else {
      *source = give_older(problem->problem, last, placement, &made);
      give(made, answer);
      return {};
    }
    *source = moecclAnswerFresh;
    give(made, answer);
    return {};
  }
  int32_t n_samples() {
    const std::lock_guard lock(mutex_);
    return latest_ == nullptr ? 0 : latest_->problem.n_samples;
  }

 private:
  // Gives the previous answer if it fits this problem and passes its gate, and otherwise the current placement.
  static moecclAnswerSource_t give_older(const moecclSampleProblem_t& p, const std::vector<int32_t>& last,
                                         int32_t* placement, moecclSampleAnswer_t* made) {
    const Room memory(solve::sample_bytes(p));
    if (last.size() == static_cast<size_t>(p.n_samples) && solve::check_placement(p, last.data()).ok()) {
      solve::Arena arena = memory.arena();
      solve::evaluate_samples(p, last.data(), made, arena);
      if (made->gain > 0 && made->gain >= p.min_gain) {
        std::copy(last.begin(), last.end(), placement);
        return moecclAnswerLast;
      }
    }
    for (int32_t i = 0; i < p.n_samples; ++i)
      placement[i] = p.current ? p.current[i] : solve::even_group(i, p.n_samples, p.n_devices);
    solve::Arena arena = memory.arena();
    solve::evaluate_samples(p, placement, made, arena);
    return moecclAnswerCurrent;
  }
  // Memory of the solver, which is not cleared: much of it is never touched.
  class Room {
   public:
    Room() = default;
    explicit Room(size_t bytes) : bytes_(bytes), memory_(std::make_unique_for_overwrite<std::byte[]>(bytes)) {}
    size_t bytes() const { return bytes_; }
    solve::Arena arena() const {
      void* at = memory_.get();
      size_t room = bytes_;
      return {std::align(solve::Arena::kAlign, 1, at, room), bytes_};
    }

   private:
    size_t bytes_ = 0;
    std::unique_ptr<std::byte[]> memory_;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ending_ || pending_ != nullptr; });
      if (ending_) return;
      const auto problem = std::exchange(pending_, nullptr);
      const uint64_t number = submitted_;
      lock.unlock();
      std::vector<int32_t> placement;
      moecclSampleAnswer_t answer{};
      Status status = contained([&]() -> Status {
        const moecclSampleProblem_t& p = problem->problem;
        placement.resize(static_cast<size_t>(p.n_samples));
        const size_t needed = solve::sample_bytes(p);
        if (memory_.bytes() < needed) memory_ = Room(needed);
        solve::Arena arena = memory_.arena();
        solve::solve_samples(p, placement.data(), &answer, arena);
        return {};
      });
      lock.lock();
      handled_ = number;
      if (status.ok()) {
        last_ = std::move(placement);
        last_answer_ = answer;
        solved_ = number;
      } else if (number == submitted_) {
        failure_ = std::move(status);
      }
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool ending_ = false;
  std::shared_ptr<const OwnedProblem> latest_, pending_;
  uint64_t submitted_ = 0, handled_ = 0, solved_ = 0;  // numbers of problems; a solve may fail
  std::vector<int32_t> last_;
  moecclSampleAnswer_t last_answer_{};
  Status failure_;
  Room memory_;         // used by the thread only
  std::thread thread_;  // last, because it uses all of the above
};

using SolverTable = api::HandleTable<BackgroundSolver, moecclSampleSolver_t, 0xC9>;

}  // namespace

moecclResult_t moecclSampleSolverCreate(moecclSampleSolver_t* solver) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(solver, "solver", "the address of a moecclSampleSolver_t"));
    MOECCL_ASSIGN_OR_RETURN(*solver, SolverTable::get().add(std::make_unique<BackgroundSolver>()));
    return {};
  });
}

moecclResult_t moecclSampleSolverSubmit(moecclSampleSolver_t handle, const moecclSampleProblem_t* problem) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(BackgroundSolver * solver, api::live<SolverTable>(handle));
    MOECCL_ASSIGN_OR_RETURN(const moecclSampleProblem_t p, api::take(problem, solve::checked));
    solver->submit(p);
    return {};
  });
}

moecclResult_t moecclSampleSolverFetch(moecclSampleSolver_t handle, double deadline_us, int32_t* placement,
                                       moecclSampleAnswer_t* answer, moecclAnswerSource_t* source) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(BackgroundSolver * solver, api::live<SolverTable>(handle));
    if (deadline_us != deadline_us)
      return error(moecclInvalidArgument, "deadline_us is not a number: give microseconds");
    if (solver->n_samples() > 0) MOECCL_TRY(api::require(placement, "placement", "room for n_samples devices"));
    MOECCL_TRY(api::check_answer(answer));
    moecclAnswerSource_t made = moecclAnswerCurrent;
    MOECCL_TRY(solver->fetch(deadline_us, placement, answer, &made));
    if (source != nullptr) *source = made;
    return {};
  });
}

moecclResult_t moecclSampleSolverDestroy(moecclSampleSolver_t handle) {
  return api::guarded(nullptr, [&] { return api::destroy<SolverTable>(handle); });
}
