// SPDX-License-Identifier: Apache-2.0
#include "src/moe/background_solver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "src/base/adopt.h"
#include "src/solve/sample.h"

namespace moeccl::comm {

// A problem together with copies of the arrays that it points to.
struct BackgroundSolver::OwnedProblem {
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

namespace {

// Gives the previous answer if it fits this problem and passes its gate, and otherwise the current placement.
moecclAnswerSource_t give_older(const moecclSampleProblem_t& p, const std::vector<int32_t>& last, int32_t* placement,
                                moecclSampleAnswer_t* made) {
  auto w = solve::Workspace::make(nullptr, 0, solve::sample_bytes(p), "");
  const auto evaluate = [&](const int32_t* of) {
    solve::Arena arena = w->arena();
    solve::evaluate_samples(p, of, made, arena);
  };
  if (last.size() == static_cast<size_t>(p.n_samples) && solve::check_placement(p, last.data()).ok()) {
    evaluate(last.data());
    if (made->gain > 0 && made->gain >= p.min_gain) {
      std::copy(last.begin(), last.end(), placement);
      return moecclAnswerLast;
    }
  }
  for (int32_t i = 0; i < p.n_samples; ++i)
    placement[i] = p.current ? p.current[i] : solve::even_group(i, p.n_samples, p.n_devices);
  evaluate(placement);
  return moecclAnswerCurrent;
}

}  // namespace

BackgroundSolver::~BackgroundSolver() {
  const std::lock_guard lock(mutex_);
  pending_ = nullptr;  // no call can fetch it any more
}

void BackgroundSolver::submit(const moecclSampleProblem_t& p) {
  auto owned = std::make_shared<const OwnedProblem>(p);
  Stream::Work work = thread_.hold([this] { return solve(), Status(); });
  {
    const std::lock_guard lock(mutex_);
    latest_ = pending_ = std::move(owned);
    ++submitted_;
    failure_ = {};  // of an earlier problem
  }
  (void)thread_.enqueue(std::move(work));
}

Status BackgroundSolver::fetch(double deadline_us, int32_t* placement, moecclSampleAnswer_t* answer,
                               moecclAnswerSource_t* source) {
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
    *source = moecclAnswerFresh;
  } else {
    *source = give_older(problem->problem, last, placement, &made);
  }
  give(made, answer);
  return {};
}

int32_t BackgroundSolver::n_samples() {
  const std::lock_guard lock(mutex_);
  return latest_ == nullptr ? 0 : latest_->problem.n_samples;
}

void BackgroundSolver::solve() {
  std::unique_lock lock(mutex_);
  const auto problem = std::exchange(pending_, nullptr);
  if (problem == nullptr) return;  // the work of an earlier submit() took it
  const uint64_t number = submitted_;
  lock.unlock();
  std::vector<int32_t> placement;
  moecclSampleAnswer_t answer{};
  Status status = contained([&]() -> Status {
    const moecclSampleProblem_t& p = problem->problem;
    placement.resize(static_cast<size_t>(p.n_samples));
    const size_t needed = solve::sample_bytes(p);
    if (memory_bytes_ < needed) {
      memory_ = std::make_unique_for_overwrite<std::byte[]>(needed);
      memory_bytes_ = needed;
    }
    MOECCL_ASSIGN_OR_RETURN(auto w, solve::Workspace::make(memory_.get(), memory_bytes_, needed, ""));
    solve::solve_samples(p, placement.data(), &answer, w.arena());
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

}  // namespace moeccl::comm
