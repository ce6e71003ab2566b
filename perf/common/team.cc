// SPDX-License-Identifier: Apache-2.0
#include "perf/common/team.h"

#include <thread>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/gpu.h"

namespace perf {
namespace {

void grouped(const std::vector<moecclComm_t>& comms, int first_rank, const char* call,
             const std::function<moecclResult_t(size_t i)>& operation) {
  if (comms.size() > 1) check(moecclGroupStart(), "moecclGroupStart");
  for (size_t i = 0; i < comms.size(); i++) check(operation(i), call, first_rank + static_cast<int>(i), comms[i]);
  if (comms.size() == 1) return;
  const moecclResult_t result = moecclGroupEnd();
  if (result == moecclSuccess) return;
  // The rank that has an error sentence is the one that failed.
  for (size_t i = 0; i < comms.size(); i++)
    if (moecclGetLastError(comms[i])[0] != '\0') check(result, call, first_rank + static_cast<int>(i), comms[i]);
  check(result, call, first_rank);
}

// Splits each communicator. A split waits for the other ranks, so those of one thread run at the same time.
std::vector<moecclComm_t> split_each(const std::vector<moecclComm_t>& comms, int first_rank, const JobOptions& options,
                                     const moecclConfig_t& config, const Grouping& grouping) {
  std::vector<moecclComm_t> made(comms.size());
  const auto split = [&](size_t i) {
    const int rank = first_rank + static_cast<int>(i);
    if (options.on_cuda()) gpu::use(rank);
    check(moecclCommSplit(comms[i], grouping.color(rank), rank, &made[i], &config), "moecclCommSplit", rank, comms[i]);
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < comms.size(); i++) threads.emplace_back(split, i);
  split(0);
  for (std::thread& t : threads) t.join();
  return made;
}

}  // namespace

Team::Team(std::vector<moecclComm_t> comms, int first_rank, bool apart, const JobOptions& options)
    : all_(std::move(comms)), comms_(all_), control_(all_), first_rank_(first_rank) {
  for (size_t i = 0; i < size(); i++) ranks_.push_back(job_rank(i));
  check(moecclCommCount(all_[0], &n_job_ranks_), "moecclCommCount", first_rank_, all_[0]);
  n_ranks_ = n_job_ranks_;
  if (apart) {
    moecclConfig_t plain = MOECCL_CONFIG_INIT;
    plain.name = "perf control";
    control_ = split_each(all_, first_rank_, options, plain, Grouping());
  }
  if (options.grouping.op != 0) split(options);
}

void Team::split(const JobOptions& options) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.timeout_ms = options.timeout_s * 1000;
  config.deterministic = options.deterministic;
  config.pace = options.pace;
  config.name = "perf group";
  comms_ = split_each(all_, first_rank_, options, config, options.grouping);
  for (size_t i = 0; i < size(); i++)
    check(moecclCommUserRank(comms_[i], &ranks_[i]), "moecclCommUserRank", job_rank(i), comms_[i]);
  check(moecclCommCount(comms_[0], &n_ranks_), "moecclCommCount", first_rank_, comms_[0]);
}

Team::~Team() {
  for (size_t i = 0; i < size(); i++) {
    if (comms_[i] != all_[i]) (void)moecclCommDestroy(comms_[i]);
    if (control_[i] != all_[i]) (void)moecclCommDestroy(control_[i]);
  }
  for (moecclComm_t comm : all_) (void)moecclCommDestroy(comm);
}

void Team::each(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const {
  grouped(comms_, first_rank_, call, operation);
}

void Team::each_control(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const {
  grouped(control_, first_rank_, call, operation);
}

void Team::barrier() const {
  std::vector<int32_t> in(size(), 1), out(size());
  each_control("barrier", [&](size_t i) {
    return moecclAllReduce(&in[i], &out[i], 1, moecclInt32, moecclSum, control_[i], nullptr);
  });
}

std::vector<double> Team::combine(const std::vector<double>& values, moecclBuiltinRedOp_t op) const {
  std::vector<std::vector<double>> out(size(), std::vector<double>(values.size()));
  each_control("sharing of figures", [&](size_t i) {
    return moecclAllReduce(values.data(), out[i].data(), values.size(), moecclFloat64, op, control_[i], nullptr);
  });
  return out[0];
}

uint64_t Team::sum(const std::vector<uint64_t>& values) const {
  std::vector<uint64_t> out(size());
  each_control("sharing of figures", [&](size_t i) {
    return moecclAllReduce(&values[i], &out[i], 1, moecclUint64, moecclSum, control_[i], nullptr);
  });
  return out[0];
}

std::vector<char> Team::gather(const std::vector<char>& records, size_t bytes) const {
  std::vector<std::vector<char>> out(size(), std::vector<char>(bytes * static_cast<size_t>(n_job_ranks_)));
  each_control("sharing of figures", [&](size_t i) {
    return moecclAllGather(records.data() + i * bytes, out[i].data(), bytes, moecclUint8, control_[i], nullptr);
  });
  return out[0];
}

}  // namespace perf
