// SPDX-License-Identifier: Apache-2.0
// Random calls of the standard collectives. Every rank draws the same calls from the same seed.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "tests/conformance/element.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

// A communicator's environment. Its cases run one after the other on the same communicator.
struct World {
  int n = 1;
  RankMode mode = RankMode::kThreads;
  const char* topology = "";
  bool deterministic = false;
  size_t staging_bytes = 0;  // small values make even small calls run in many chunks
};
std::ostream& operator<<(std::ostream& out, const World& world);

struct Case {
  moecclOp_t op = moecclOpAllReduce;
  moecclDataType_t type = moecclFloat32;
  int reduction = moecclSum;
  size_t count = 0;
  int root = 0;
  bool in_place = false;
  bool heap_send = false, heap_recv = false;  // memory of moecclMemAlloc, else of malloc
  bool async = false;
  size_t send_offset = 0, recv_offset = 0;  // elements, so that buffers start anywhere
  std::string algorithm;                    // forced; empty: chosen by price
  std::vector<size_t> matrix;               // AllToAllv and SendRecv: [n][n] elements from row to column
  uint64_t seed = 0;                        // of the data

  std::string describe() const;
  bool reduces() const { return op == moecclOpAllReduce || op == moecclOpReduce || op == moecclOpReduceScatter; }
};

// Draws a case. names[op]: the algorithms that may be forced. max_bytes limits each rank's buffers.
Case draw_case(std::mt19937_64& random, const World& world, const std::vector<std::vector<std::string>>& names,
               size_t max_bytes);

// Return the number of elements of one rank's buffers.
size_t send_elements(const Case& c, int n, int rank);
size_t recv_elements(const Case& c, int n, int rank);
// Returns element i of rank's input.
Number input_at(const Case& c, int n, int rank, size_t i);
// Returns whether the call defines element i of rank's output, and stores its required value.
bool expected_at(const Case& c, int n, int rank, size_t i, Number* value);
// Returns true when results are rounded: averages of floats.
bool rounds(const Case& c);

}  // namespace moeccl::testing
