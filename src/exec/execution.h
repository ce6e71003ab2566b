// SPDX-License-Identifier: Apache-2.0
// The host executor: runs one rank's program on host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/exec/agreed_task.h"

namespace moeccl::exec {

// More bytes than any process can address.
inline constexpr uint64_t kMostBytes = uint64_t{1} << 57;

class Execution final : public AgreedTask {
 public:
  // The operation begins at the first poll.
  Execution(Fabric& fabric, const Operation& op);

  // Continues an operation that `begun` has entered on all ranks.
  Execution(const AgreedTask& begun, const Operation& op);

  // Sets the operation's scale, which was read from where `scale_at` points. Must be called before the first poll.
  void scale_by(kernels::Scalar scale) { scale_ = scale; }

  Progress poll() override;
  uint32_t awaits() const override {
    return phase_ != Phase::kRun || awaits_one_ ? waiting_peer_ : transport::Engine::kAnyone;
  }
  std::string describe() const override;
  void let_go() override;
  void abandon() override;

  // Bytes that this rank stored into or copied from other ranks' memory, valid after the end.
  uint64_t wire_bytes() const { return wire_bytes_; }
  const char* algorithm() const { return choice_.algorithm; }

 private:
  enum class Phase : uint8_t { kNew, kEnter, kAgree, kRun };
  Progress agree();
  void choose(const Choice& choice);
  Progress run();
  Progress run_lane(const plan::Lane& lane, LaneState& state, bool one_step);
  Progress step(const plan::Step& s, uint32_t chunk);
  Progress traced_step(const plan::Step& s, uint32_t chunk);
  bool last_chunk_known();
  // Finds data from a network that only one copy to Output reads. It may be received in Output directly, see
  // transport::Landings.
  void find_landings();
  bool worth_landing(const plan::Ref& src);
  void land(const LandingStep& l, uint32_t chunk);
  Result<bool> landed(const plan::Step& s, uint32_t chunk);  // also prepares the landing of the slot's next chunk
  void bind_blocks(uint64_t done);  // AllToAllv: binds what is left of each block after `done` elements
  void begin_rest();
  Status check_buffers();
  uint64_t output_bytes() const;
  int64_t longest_step_ns() const;
  Progress finish();

  Progress wait(const plan::Step& s, uint32_t chunk);
  Progress signal(const plan::Step& s, uint32_t chunk);
  Progress copy(const plan::Step& s, uint32_t chunk);
  Progress reduce(const plan::Step& s, uint32_t chunk);
  // Collects in copies_ the addresses that the moves after a reduction store to. Leaves it empty unless all can be
  // stored to directly.
  Status find_copies(const plan::Step& s, const plan::Range& dst, uint64_t length, uint32_t chunk);
  bool merges(const plan::Step& s, const plan::Range& dst, const plan::Step& move, const std::byte* to);
  Progress gather_rows(const plan::Step& s, uint32_t chunk);
  Progress scatter_rows(const plan::Step& s, uint32_t chunk);
  Progress reduce_rows(const plan::Step& s, uint32_t chunk);
  Progress reduce_stretches(const plan::Step& s, uint32_t chunk, const plan::SumBlock& block);

  Status resolve_peer(uint32_t peer);
  Status resolve_peer_if_needed(uint32_t peer, const plan::Step& s, const plan::Ref& src);
  // Returns the address of a Ref at a chunk for loads or stores, or null if it has none (a peer's private memory).
  std::byte* address(const plan::Ref& ref, const plan::Range& range);
  std::byte* staging(uint32_t rank);
  plan::Range range(const plan::Ref& ref, uint64_t length, uint32_t chunk) const;
  uint64_t governing(const plan::Step& s) const;
  // Returns row 0 of a row list's buffer or slot.
  std::byte* row_base(const plan::Ref& ref, uint32_t chunk, uint32_t plane);
  // One plane for rows alone; two for rows (plane 0) and their scales (plane 1). Each is dense in its buffer. In
  // staging, the scales of all slots follow the rows of all slots.
  uint32_t n_planes() const { return op_.scales.bytes > 0 ? 2 : 1; }
  uint32_t plane_bytes(uint32_t plane) const {
    const auto rows = static_cast<uint32_t>(op_.element_bytes - op_.scales.bytes);
    return plane == 0 ? rows : op_.scales.bytes;
  }
  // Returns where a plane of a slot begins in its half of the staging, in bytes.
  uint64_t plane_base(const plan::Ref& ref, uint32_t chunk, uint32_t plane) const {
    const plan::Program& p = *choice_.program;
    const uint64_t rows = plane == 0 ? 0 : plan::staging_elements(binding_, p);
    return rows * plane_bytes(0) + plan::slot_base(binding_, p, ref, chunk) * plane_bytes(plane);
  }
  // Returns the plane at which a step resumes after its put found the link full.
  uint32_t first_plane(const plan::Step& s, uint32_t chunk) const {
    return packed_ == &s && packed_chunk_ == chunk ? packed_plane_ : 0;
  }
  // Writes `count` rows of the destination, from row `first` on, by write(base, first row). Where this rank cannot
  // write to it, `base` is scratch memory, from which the rows are put.
  template <class Write>
  Progress write_rows(const plan::Step& s, uint32_t chunk, uint32_t plane, uint64_t first, uint64_t count,
                      Write&& write);
  // Puts the bytes at `from`. If this blocks, the same step must be repeated.
  Progress put(uint32_t rank, uint64_t offset, const std::byte* from, uint64_t bytes);
  // Returns whether the step may run while sources of its lane's earlier puts are still being read: the memory that it
  // writes, or lets others write, may be such a source.
  bool sources_allow(const plan::Step& s);
  bool all_sources_taken();
  // Returns memory for the data that a step packs and then puts to dst's rank: the link's own where it has any,
  // otherwise scratch memory. Returns null while there is no room or another step's put still needs the scratch memory.
  // `packed`: this step has packed the data before.
  std::byte* scratch_for(const plan::Step& s, uint32_t chunk, uint64_t bytes, bool* packed);
  void account(uint32_t rank, uint64_t bytes, bool stored);
  // Returns whether to store past the cache: large Outputs, which are not read soon, and data that another core reads.
  bool uses_stream(const plan::Ref& dst, uint64_t bytes) const {
    return plan::streams_to_others(dst, fabric().rank, bytes) ||
           (dst.buffer != plan::Buffer::kStaging && stream_output_);
  }

  Choice choice_;
  plan::Binding binding_;
  kernels::Scalar scale_;
  Phase phase_ = Phase::kNew;
  uint32_t agreed_ = 0;  // peers [0, agreed_) have been looked at
  bool all_reachable_ = true;
  bool chunks_known_ = true;
  bool rest_follows_ = false;             // AllToAllv: op_.for_rest continues after this program
  uint64_t moved_ = 0;                    // elements of each block that were moved before this program
  std::vector<uint64_t> blocks_left_[4];  // send and receive offsets and lengths
  bool stream_output_ = false;
  bool awaits_one_ = false;  // runs one step at a time, and little data is on its way to this rank meanwhile
  uint64_t wire_bytes_ = 0;
  uint32_t traffic_class_ = 0;
  transport::EngineUse engine_use_;
  uint64_t half_ = 0;  // offset of this operation's half of the staging
  Scratch& scratch_;   // the communicator's, so that a small operation allocates nothing
  std::vector<LaneState>& lanes_;
  std::vector<PeerBuffers>& peers_;
  std::vector<const void*>& srcs_;
  std::vector<kernels::Scalar>& scales_;
  std::vector<LandingStep>& landings_;
  std::vector<void*>& copies_;
  std::vector<PostedPut>& posted_;
  const plan::Step* packed_ = nullptr;  // the step whose data is packed in the fabric's scratch and not yet put
  uint32_t packed_chunk_ = 0, packed_plane_ = 0;
  uint32_t merged_ = 0;    // steps after the last one that were done together with it
  LaneTrace trace_;        // for operations that ask for it
  size_t lane_ = 0;        // the lane that runs now
  bool trickled_ = false;  // a put has moved some bytes but is not complete
};

}  // namespace moeccl::exec
