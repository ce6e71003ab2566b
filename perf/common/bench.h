// SPDX-License-Identifier: Apache-2.0
// Times and checks one operation at one size: the core of every *_perf binary.
#ifndef PERF_COMMON_BENCH_H_
#define PERF_COMMON_BENCH_H_

#include <string>
#include <vector>

#include "perf/common/buffer.h"
#include "perf/common/collective.h"
#include "perf/common/pattern.h"
#include "perf/common/progress.h"
#include "perf/common/record.h"
#include "perf/common/team.h"

namespace perf {

// One line of the table, before it is measured.
struct Case {
  moecclDataType_t type;
  RedOp op;
  int root;
  size_t size;  // nccl-tests bytes
};

class Bench {
 public:
  Bench(const Options& options, const Collective& collective, const Team& team, size_t buffer_bytes,
        Progress* progress);
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench();

  Line describe(const Case& c) const;
  Shape shape(const Case& c) const;
  void warm_up(const Case& c);
  Measured measure(const Case& c, bool in_place);

 private:
  struct Member;  // one rank of the team
  struct Samples {
    double total_us = 0;
    std::vector<double> iteration_us;
    std::vector<std::vector<double>> process_us;
  };

  Samples time_iterations(const Case& c, bool in_place);
  Samples time_graph(const Case& c, bool in_place);
  void issue(const Case& c, bool in_place, size_t iteration);
  void wait();
  void combine(Samples& samples) const;
  std::vector<std::vector<double>> by_process(const std::vector<double>& us) const;
  uint64_t verify(const Case& c, bool in_place);
  void prepare_data(const Case& c, bool in_place, uint64_t seed);
  uint64_t count_wrong(const Case& c, bool in_place, uint64_t seed);
  void use_device(size_t i) const;
  void check_async(size_t i) const;
  char* send_at(const Case& c, size_t i, bool in_place, size_t shift) const;
  char* recv_at(const Case& c, size_t i, bool in_place, size_t shift) const;
  moecclRedOp_t red_op(const Case& c, size_t i);
  void drop_operators();

  const Options& options_;
  const Collective& collective_;
  const Team& team_;
  size_t buffer_bytes_;
  Progress* progress_;
  uint64_t seed_ = 1;
  std::vector<Member> members_;
};

}  // namespace perf

#endif  // PERF_COMMON_BENCH_H_
