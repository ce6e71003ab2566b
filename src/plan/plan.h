// SPDX-License-Identifier: Apache-2.0
// The plan language. A collective is a plan: for each rank, a program of small steps on a few lanes, which is the body
// of a loop over chunks. A plan holds no pointers and no counts: steps name buffers and extents, which a Binding turns
// into ranges at run time. Executors run it, cost.h prices it, checker.h proves it, and printer.h explains it.
//
// Order. A lane runs its steps in order, for chunk 0, then chunk 1, ...; lanes run independently. All other order comes
// from signals: kSignal(peer, sig) tells `peer` (which may be the rank itself, for order between lanes) that all
// earlier steps of this lane are done and visible; kWait(peer, sig) takes the signals of `peer` in order. For each
// ordered pair of ranks and each sig, all signals are in one lane, all waits are in one lane, and the body holds as
// many waits as signals. The j-th wait of the body at chunk c waits for the j-th signal of chunk c - lag, and is
// skipped when c < lag (a credit). Steps run at every chunk, or only at the first or the last one (`when`), which
// places them before or after the loop. A sig that signals and waits of such a step use is not used by a step with
// another `when` for that pair, and has lag 0.
//
// Memory. Staging is memory of each rank that peers write and read through the transport. At the start of an operation
// no peer uses it, and its contents are undefined. A step may touch another rank's Input and Output only with `views`,
// after a signal that the other rank sent in this operation, and before that rank ends its program: builders ensure
// this order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/plan/levels.h"
#include "src/plan/op.h"

namespace moeccl::plan {

enum class StepKind : uint8_t {
  kPut,          // dst (of a peer) = src (own)
  kSignal,       // to peer, sig
  kWait,         // for peer, sig, lag
  kCopy,         // dst (own) = src (own, or a peer's through a view)
  kReduce,       // dst = srcs[0] op srcs[1] op ... in this order; any of them through a view
  kGatherRows,   // rows of src (own) packed into dst (own or peer's staging)
  kScatterRows,  // rows of src (own staging) spread into dst (own)
  kReduceRows,   // rows of dst (own or peer's staging) = weighted sums of rows of srcs, or sums of stretches of them
};
inline constexpr int kNumStepKinds = 8;
const char* step_kind_name(StepKind kind);

enum class Buffer : uint8_t { kInput, kOutput, kStaging };

// Part `part` of `parts` of the current chunk of a block (Input, Output) or of a slot (Staging) of `rank`. A slot holds
// one chunk of one block, or only that part of it (Program::n_part_slots); the physical slot rotates with the chunk,
// see Program::depth.
struct Ref {
  uint32_t rank = 0;
  Buffer buffer = Buffer::kInput;
  uint16_t index = 0;  // block or slot
  uint16_t part = 0, parts = 1;

  friend bool operator==(const Ref&, const Ref&) = default;
};

inline constexpr uint8_t kMaxSigs = 8;  // per ordered pair of ranks and operation
inline constexpr uint32_t kNoRows = ~0u;

enum class When : uint8_t { kEvery, kFirst, kLast };

struct Step {
  StepKind kind = StepKind::kCopy;
  When when = When::kEvery;
  uint8_t sig = 0;         // kSignal, kWait
  uint16_t lag = 0;        // kWait
  uint32_t peer = 0;       // kSignal, kWait
  uint32_t ordinal = 0;    // kSignal, kWait: position among the body's signals/waits of (peer, sig); set by finalize()
  uint32_t per_chunk = 0;  // kSignal, kWait: how many of them the body holds; set by finalize()
  Ref dst;
  uint32_t first_src = 0, n_srcs = 0;  // into Program::srcs
  uint32_t rows = kNoRows;             // number of the row list in the Binding: k*Rows
  bool final_reduce = false;           // kReduce, kReduceRows: apply the divisor of Avg (and store for the user)
  bool read_again = false;             // a later step of this chunk reads dst: keep it in the cache
  uint16_t copies = 0;                 // kReduce: this many next steps only move dst elsewhere; set by finalize()
  uint32_t divisor =
      0;  // with final_reduce: this step's divisor; 0: kReduce uses the operation's, kReduceRows of stretches none
};

// The resource that a lane uses, so that executors can give each lane its own and reports can name it.
enum class LaneKind : uint8_t { kMain, kInter, kIntra, kCopy };
const char* lane_kind_name(LaneKind kind);

struct Lane {
  LaneKind kind = LaneKind::kMain;
  std::vector<Step> steps;
};

// One rank's part of a plan.
struct Program {
  uint32_t rank = 0;
  uint32_t n_slots = 0;  // slots of this rank's staging per rotation; the same on all ranks
  uint32_t depth = 1;    // rotations: chunk c uses the slots of rotation c % depth; the same on all ranks
  // Slots n_slots, n_slots + 1, ... of a rotation, each with room for only one of `slot_parts` parts of a chunk; the
  // same on all ranks.
  uint32_t n_part_slots = 0, slot_parts = 1;
  // From slot `first` on, a block of rows takes `width` slots. Ascending; empty: a block has one slot.
  struct SlotRun {
    uint32_t first, width;
  };
  std::vector<SlotRun> slot_runs;
  std::vector<Lane> lanes;
  std::vector<Ref> srcs;

  bool holds_part(const Ref& ref) const { return ref.buffer == Buffer::kStaging && ref.index >= n_slots; }

  bool touches_peers = false;  // some step uses another rank's Input or Output; set by finalize()

  // Peers with which the body exchanges signals, and how many per chunk.
  struct SigTotal {
    uint32_t peer;
    uint8_t sig;
    uint32_t sent, awaited;  // per chunk, or per operation when `once`
    bool once = false;
  };
  std::vector<SigTotal> totals;

  // Numbers the signals and waits and fills totals. Builders call it last.
  void finalize();
  uint32_t n_steps() const;
  // Returns the slots of the block that begins at `slot`, or 0 if none begins there.
  uint32_t block_slots(uint32_t slot) const;
};

// The memory of other ranks that can be reached without their help, the same on every rank.
struct Reach {
  bool staging = true;  // every pair of ranks maps the other's staging (false between hosts: puts only)
  bool views = false;   // Inputs and Outputs of this operation too: threads of one process, or symmetric-heap buffers
  bool reads = false;  // Inputs and Outputs can be copied from (kCopy's src), as by process_vm_readv; views imply reads
};

// The numbers of chunks into which TensorAllToAll's pipelined plans cut a message, as the chunk solver computes them
// (MoNTA, Algorithms 1 and 2). 0: the builder's default.
struct PipelineChunks {
  uint32_t o2 = 0, o3 = 0, lean = 0;
};

// The level of a tree whose uplinks have the most bytes under way in a round trip, if that is much; see long_line.h.
struct LongLine {
  uint32_t level = 0;
  uint64_t bytes = 0;  // of one group's uplink in a round trip; 0: no line of the tree is long
};

// Everything that a builder may know about an operation: what all ranks know alike.
struct Shape {
  moecclOp_t op = moecclOpAllReduce;
  uint32_t n_ranks = 1;
  uint32_t root = 0;
  uint64_t count = 0;  // elements per block, as in the C call; for AllToAllv the largest block if known, else 0
  uint32_t element_bytes = 1;
  bool deterministic = false;
  bool in_place = false;  // private to a rank: may change that rank's program, never its signals or the plan's hash
  bool scaled = false;    // premulsum: only the rank itself may read its Input
  Reach reach;
  bool coarse = false;  // every step starts a kernel: chunks without staging are long, so that there are few
  uint64_t staging_bytes = 16u << 20;  // cap per rank on the slots of all rotations
  LongLine long_line = {};             // only where staging cannot be read, because then the data crosses it by puts
  // Operations of a placement (experts.h): blocks of each user buffer, the most of any rank. 0: the operation's own
  // number.
  uint32_t most_in_blocks = 0, most_out_blocks = 0;
  // TensorAllToAll: [n_ranks] groups of ranks whose Inputs are equal; build_all() and build_for() fill it from the
  // tree.
  std::vector<uint32_t> group_of = {};
  PipelineChunks pipeline_chunks = {};
};

// Return the number of blocks of the user's buffers, each of `count` elements.
uint32_t in_blocks(const Shape& shape);
uint32_t out_blocks(const Shape& shape);

// How the loop runs: chunk c of a block is its elements [c * chunk, min((c+1) * chunk, length)).
struct Chunking {
  uint64_t chunk = 0;     // elements; slot size = chunk * element_bytes rounded up to 64 bytes
  uint32_t n_chunks = 1;  // at least 1, even for a count of 0: every rank still takes part
};

// A plan of all ranks, as readers take it. `hash` identifies what was built: it is equal on ranks that built the same.
struct Plan {
  std::string algorithm;
  Shape shape;
  Chunking chunking;
  uint64_t hash = 0;
  std::vector<Program> programs;  // [n_ranks], or only this rank's when built for execution
};

}  // namespace moeccl::plan
