// SPDX-License-Identifier: Apache-2.0
// Runs the programs of all ranks of a plan of rows in one thread, on real bytes, with the reference kernels. Lanes
// advance in an order drawn from a seed, so that a missing signal shows as wrong bytes for some seed.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/table.h"
#include "src/plan/binding.h"

namespace moeccl::test {

struct RankBuffers {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
};

class Interpreter {
 public:
  Interpreter(const std::vector<plan::Program>& programs, const std::vector<plan::Binding>& bindings,
              std::vector<RankBuffers> buffers, moecclDataType_t type, bool grouped)
      : programs_(programs), bindings_(bindings), buffers_(std::move(buffers)), type_(type), grouped_(grouped) {
    for (size_t r = 0; r < programs.size(); ++r) {
      const plan::Program& p = programs[r];
      staging_.emplace_back(plan::staging_elements(bindings[r], p) * bindings[r].element_bytes, std::byte{0xCD});
      for (const plan::Lane& lane : p.lanes) lanes_.push_back({static_cast<uint32_t>(r), &lane, 0, 0});
    }
  }

  // Returns false, with a test failure, when the lanes block each other.
  bool run(uint32_t seed) {
    std::mt19937 random(seed);
    for (;;) {
      bool moved = false, done = true;
      std::shuffle(lanes_.begin(), lanes_.end(), random);
      for (Position& at : lanes_) {
        // Occasionally a lane runs far ahead.
        for (auto n = random() % 4 == 0 ? 1000 : random() % 3; n > 0 && advance(at); --n) moved = true;
        done = done && at.chunk >= bindings_[at.rank].chunking.n_chunks;
      }
      if (done) return true;
      idle_ = moved ? 0 : idle_ + 1;
      if (idle_ > 100) {
        ADD_FAILURE() << "the plan is stuck: " << describe();
        return false;
      }
    }
  }

 private:
  struct Position {
    uint32_t rank;
    const plan::Lane* lane;
    uint32_t chunk;
    size_t step;
  };

  // Does one step. Returns false when the lane has ended or waits.
  bool advance(Position& at) {
    const plan::Binding& b = bindings_[at.rank];
    if (at.chunk >= b.chunking.n_chunks) return false;
    if (at.step < at.lane->steps.size()) {
      const plan::Step& step = at.lane->steps[at.step];
      const bool runs = step.when == plan::When::kEvery || (step.when == plan::When::kFirst && at.chunk == 0) ||
                        (step.when == plan::When::kLast && at.chunk + 1 == b.chunking.n_chunks);
      if (runs && !execute(at, step)) return false;
    }
    if (++at.step >= at.lane->steps.size()) at.step = 0, ++at.chunk;
    return true;
  }

  bool execute(const Position& at, const plan::Step& step) {
    using plan::StepKind;
    const plan::Program& p = programs_[at.rank];
    switch (step.kind) {
      case StepKind::kSignal:
        ++signals_[{at.rank, step.peer, step.sig}];
        return true;
      case StepKind::kWait: {
        if (at.chunk < step.lag) return true;
        const uint64_t target = uint64_t{at.chunk - step.lag} * step.per_chunk + step.ordinal + 1;
        return signals_[{step.peer, at.rank, step.sig}] >=
               (step.when == plan::When::kEvery ? target : step.ordinal + 1);
      }
      case StepKind::kGatherRows:
      case StepKind::kScatterRows:
        move_rows(at, step, p.srcs[step.first_src]);
        return true;
      case StepKind::kReduceRows:
        reduce_rows(at, step);
        return true;
      default:
        ADD_FAILURE() << "the interpreter knows only steps of rows";
        return false;
    }
  }

  std::byte* base(const Position& at, const plan::Ref& ref) {
    const plan::Binding& b = bindings_[at.rank];
    if (ref.buffer == plan::Buffer::kStaging)
      return staging_[ref.rank].data() + plan::slot_base(b, programs_[at.rank], ref, at.chunk) * b.element_bytes;
    EXPECT_EQ(ref.rank, at.rank) << "a row step touches another rank's buffer";
    return ref.buffer == plan::Buffer::kInput ? const_cast<std::byte*>(buffers_[ref.rank].in) : buffers_[ref.rank].out;
  }

  // Returns how many rows the block holds that begins at a slot.
  uint64_t room(const Position& at, const plan::Ref& ref) const {
    return programs_[at.rank].block_slots(ref.index) * bindings_[at.rank].slot_elements;
  }

  void move_rows(const Position& at, const plan::Step& step, const plan::Ref& src) {
    const plan::Binding& b = bindings_[at.rank];
    const plan::RowBlock& rows = b.rows[step.rows * b.chunking.n_chunks + at.chunk];
    if (step.dst.buffer == plan::Buffer::kStaging) {
      EXPECT_LE(rows.dst_first + rows.count, room(at, step.dst)) << "a block overflows its slots";
    }
    kernels::ScaleRowsArgs args;
    args.rows = {base(at, step.dst), base(at, src),  rows.dst_index, rows.src_index,
                 rows.dst_first,     rows.src_first, rows.count,     b.element_bytes};
    args.weights = rows.weights;
    const kernels::KernelTable& table = *kernels::select("reference");
    if (rows.weights)
      table.scale_rows[type_](args);
    else
      table.copy_rows(args.rows);
  }

  void reduce_rows(const Position& at, const plan::Step& step) {
    const plan::Binding& b = bindings_[at.rank];
    const plan::SumBlock& sums = b.sums[step.rows * b.chunking.n_chunks + at.chunk];
    if (step.dst.buffer == plan::Buffer::kStaging) {
      EXPECT_LE(sums.dst_first + sums.count, room(at, step.dst)) << "a block overflows its slots";
    }
    ASSERT_EQ(sums.src_first, nullptr) << "stretches are not interpreted here";
    std::vector<const void*> bases;
    for (uint32_t i = 0; i < step.n_srcs; ++i) bases.push_back(base(at, programs_[at.rank].srcs[step.first_src + i]));
    kernels::ReduceRowsArgs args;
    args.dst = base(at, step.dst);
    args.bases = bases.data();
    args.offsets = sums.offsets;
    args.terms = sums.terms;
    args.weights = sums.weights;
    args.dst_index = sums.dst_index;
    args.dst_first = sums.dst_first;
    args.count = sums.count;
    args.row_elements = b.element_bytes / type_bytes();
    args.grouped = grouped_;
    kernels::select("reference")->reduce_rows[type_](args);
  }

  size_t type_bytes() const {
    constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return kBytes[type_];
  }

  std::string describe() const {
    std::string text;
    for (const Position& at : lanes_) {
      if (at.chunk >= bindings_[at.rank].chunking.n_chunks) continue;
      const plan::Step& step = at.lane->steps[at.step];
      text += format("rank {} lane {} chunk {}: {} {} sig {}; ", at.rank, plan::lane_kind_name(at.lane->kind), at.chunk,
                     plan::step_kind_name(step.kind), step.peer, int{step.sig});
    }
    return text;
  }

  const std::vector<plan::Program>& programs_;
  const std::vector<plan::Binding>& bindings_;
  std::vector<RankBuffers> buffers_;
  moecclDataType_t type_;
  bool grouped_;
  std::vector<std::vector<std::byte>> staging_;
  std::vector<Position> lanes_;
  std::map<std::tuple<uint32_t, uint32_t, uint8_t>, uint64_t> signals_;
  int idle_ = 0;
};

}  // namespace moeccl::test
