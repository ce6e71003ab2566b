// SPDX-License-Identifier: Apache-2.0
#include "dense.h"

#include <algorithm>

namespace training {

Ranks::Ranks(moecclComm_t comm, const Links& links) : tokens(comm), links_(links) {
  check(moecclCommUserRank(comm, &rank), "moecclCommUserRank", comm);
  check(moecclCommCount(comm, &n), "moecclCommCount", comm);
  dense = beside(moecclPriorityDP);
  check(moecclStreamCreate(&stream), "moecclStreamCreate");
}

Ranks::~Ranks() {
  (void)moecclStreamDestroy(stream);
  (void)moecclCommDestroy(dense);
}

moecclComm_t Ranks::beside(int priority) const {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.deterministic = 1;
  config.priority = priority;
  config.timeout_ms = 120000;
  // A paced child without its own topology shares the parent's emulated links.
  config.pace = links_.pace ? 1 : 0;
  config.topology = links_.pace ? nullptr : links_.topology;
  moecclComm_t made = nullptr;
  check(moecclCommSplit(tokens, 0, rank, &made, &config), "moecclCommSplit", tokens);
  return made;
}

DensePart::DensePart(const Ranks& ranks, size_t n_weights)
    : ranks_(ranks),
      shard_((n_weights + static_cast<size_t>(ranks.n) - 1) / static_cast<size_t>(ranks.n)),
      value_(shard_ * static_cast<size_t>(ranks.n)),
      grad_(value_.size()),
      first_(shard_),
      second_(shard_) {}

Weight DensePart::take(size_t rows, size_t columns, float scale, uint64_t seed) {
  const Weight w{&value_[used_], &grad_[used_], rows, columns};
  used_ += rows * columns;
  const Floats init = random_matrix(rows * columns, scale, seed);
  std::copy(init.begin(), init.end(), w.value);
  return w;
}

Norm DensePart::take_norm(size_t width) {
  const Norm m{take(1, width, 0, 0), take(1, width, 0, 0)};
  std::fill_n(m.gain.value, width, 1.0f);
  return m;
}

void DensePart::begin_sum() {
  check(moecclReduceScatter(grad_.data(), &grad_[static_cast<size_t>(ranks_.rank) * shard_], shard_, moecclFloat32,
                            moecclSum, ranks_.dense, ranks_.stream),
        "moecclReduceScatter", ranks_.dense);
}

Floats DensePart::gradient() const {
  Floats all(grad_.size());
  check(moecclAllGather(&grad_[static_cast<size_t>(ranks_.rank) * shard_], all.data(), shard_, moecclFloat32,
                        ranks_.dense, nullptr),
        "moecclAllGather", ranks_.dense);
  all.resize(used_);
  return all;
}

void DensePart::learn(const Adam& a) {
  const size_t mine = static_cast<size_t>(ranks_.rank) * shard_;
  adam(a, shard_, &value_[mine], &grad_[mine], first_.data(), second_.data());
  std::fill(grad_.begin(), grad_.end(), 0.0f);
  check(moecclAllGather(&value_[mine], value_.data(), shard_, moecclFloat32, ranks_.dense, ranks_.stream),
        "moecclAllGather", ranks_.dense);
}

}  // namespace training
