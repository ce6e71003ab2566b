// SPDX-License-Identifier: Apache-2.0
// Small operations: the plan `oneshot` without its steps. Every rank puts what it gives into its own outbox, one line
// for all peers, and takes what it needs out of theirs; data and signal arrive together. Which operations run so
// follows from their shape alone, so all ranks agree. Only the sizes of an AllToAllv are private: there each rank says
// in its outbox whether its data is there, and when that of one rank is not, all go on with the plan.
#pragma once

#include <optional>
#include <string_view>

#include "src/exec/execution.h"

namespace moeccl::exec {

// Bytes that a rank gives in an operation of blocks of `block_bytes`; what fits into an Outbox can run eagerly.
uint64_t eager_bytes(moecclOp_t op, uint32_t n_ranks, uint64_t block_bytes);
// AllToAllv: of the table that stands before the data.
uint64_t eager_table_bytes(uint32_t n_ranks);
// The one rule by which an operation of these blocks runs eagerly, where all ranks' outboxes can be read: it is the
// form of the plan `oneshot`. An AllToAllv, whose blocks only its ranks know, begins so whatever plan goes on with it.
bool runs_eagerly(moecclOp_t op, std::string_view algorithm, uint32_t n_ranks, uint64_t block_bytes);

class Eager final : public AgreedTask {
 public:
  Eager(Fabric& fabric, const Operation& op);

  Progress poll() override;
  std::string describe() const override;
  Status diagnose() override { return rest_ ? rest_->diagnose() : AgreedTask::diagnose(); }
  void abandon() override;

 private:
  bool gives() const;      // into its outbox
  bool takes_all() const;  // from every rank, rather than from the root or nobody
  void give();
  Progress look(uint32_t peer);  // kMoved: what it gives is here
  void take();
  void give_blocks();  // AllToAllv
  Progress look_at_block(uint32_t peer);
  void take_blocks();
  const std::byte* data_of(uint32_t rank) const {
    const Fabric& f = fabric();
    return rank == f.rank ? f.own->outbox(sequence_)->data : f.outbox(rank, sequence_)->data;
  }
  // What `rank` gives to this one, `offset` bytes into what it gives. Own data comes from the caller's buffer where it
  // is the same: just stored, it would be loaded in wider pieces, which stalls.
  const std::byte* given_by(uint32_t rank, uint64_t offset) const {
    const bool own = rank == fabric().rank && !op_.scaled;
    return (own ? static_cast<const std::byte*>(op_.input) : data_of(rank)) + offset;
  }

  uint64_t block_bytes_;
  uint64_t wire_bytes_ = 0;
  uint32_t next_ = 0;       // the ranks before it have given
  uint32_t published_ = 0;  // AllToAllv that goes on with the plan: the ranks before it have said their sizes
  bool given_ = false;
  bool all_fit_ = true;  // AllToAllv: the data of the ranks before next_ is in their outboxes
  std::optional<Execution> rest_;
};

// Runs one on this thread, as drive() does.
Status run_eager(Fabric& fabric, const Operation& op);

}  // namespace moeccl::exec
