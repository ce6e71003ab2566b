// SPDX-License-Identifier: Apache-2.0
#include "perf/common/team.h"

#include <utility>

#include "perf/common/fail.h"

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

}  // namespace

Team::Team(std::vector<moecclComm_t> comms, int first_rank, bool apart)
    : comms_(std::move(comms)), control_(comms_), apart_(apart), first_rank_(first_rank) {
  check(moecclCommCount(comms_[0], &n_ranks_), "moecclCommCount", first_rank_, comms_[0]);
  if (!apart_) return;
  moecclConfig_t plain = MOECCL_CONFIG_INIT;
  plain.name = "perf control";
  grouped(comms_, first_rank_, "moecclCommSplit",
          [&](size_t i) { return moecclCommSplit(comms_[i], 0, rank(i), &control_[i], &plain); });
}

Team::~Team() {
  if (apart_)
    for (moecclComm_t comm : control_) (void)moecclCommDestroy(comm);
  for (moecclComm_t comm : comms_) (void)moecclCommDestroy(comm);
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
  std::vector<std::vector<char>> out(size(), std::vector<char>(bytes * static_cast<size_t>(n_ranks_)));
  each_control("sharing of figures", [&](size_t i) {
    return moecclAllGather(records.data() + i * bytes, out[i].data(), bytes, moecclUint8, control_[i], nullptr);
  });
  return out[0];
}

}  // namespace perf
