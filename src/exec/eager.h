// SPDX-License-Identifier: Apache-2.0
// Small operations: the plan `oneshot` without its steps. Every rank puts its data into its own outbox, one line for
// all peers, and takes what it needs from theirs; data and signal arrive together. Whether an operation runs this way
// follows from its shape alone, so all ranks agree. Only the sizes of an AllToAllv are private: each rank says in its
// outbox whether its data is there, and if the data of any rank is not, all ranks go on with the plan.
#pragma once

#include <optional>
#include <string_view>

#include "src/exec/execution.h"

namespace moeccl::exec {

// Returns the bytes that a rank gives in an operation on blocks of `block_bytes`. If they fit into an Outbox, the
// operation can run eagerly.
uint64_t eager_bytes(moecclOp_t op, uint32_t n_ranks, uint64_t block_bytes);
// AllToAllv: returns the size of the table in front of the data.
uint64_t eager_table_bytes(uint32_t n_ranks);
// The only rule that decides whether an operation on these blocks runs eagerly, provided that all ranks' outboxes can
// be read: it has the form of the plan `oneshot`. An AllToAllv, whose blocks only its ranks know, begins eagerly
// whatever plan continues it.
bool runs_eagerly(moecclOp_t op, std::string_view algorithm, uint32_t n_ranks, uint64_t block_bytes);

class Eager final : public AgreedTask {
 public:
  Eager(Fabric& fabric, const Operation& op);

  Progress poll() override;
  std::string describe() const override;
  Status diagnose() override { return rest_ ? rest_->diagnose() : AgreedTask::diagnose(); }
  void let_go() override;
  void abandon() override;

 private:
  bool gives() const;      // puts data into its outbox
  bool takes_all() const;  // takes data from every rank, rather than from the root only or from none
  void give();
  Progress look(uint32_t peer);  // kMoved: the peer's data has arrived
  void take();
  void give_blocks();  // AllToAllv
  Progress look_at_block(uint32_t peer);
  void take_blocks();
  const std::byte* data_of(uint32_t rank) const {
    const Fabric& f = fabric();
    return rank == f.rank ? f.own->outbox(sequence_)->data : f.outbox(rank, sequence_)->data;
  }
  // Returns the data that `rank` gives to this rank, from `offset` bytes on. This rank's own data comes from the
  // caller's buffer where it is the same: the copy in the outbox has just been stored, and loading it in wider pieces
  // stalls.
  const std::byte* given_by(uint32_t rank, uint64_t offset) const {
    const bool own = rank == fabric().rank && !op_.scaled;
    return (own ? static_cast<const std::byte*>(op_.input) : data_of(rank)) + offset;
  }

  uint64_t block_bytes_;
  uint64_t wire_bytes_ = 0;
  uint32_t next_ = 0;       // all ranks before it have given their data
  uint32_t published_ = 0;  // AllToAllv that continues with the plan: all ranks before it have published their sizes
  bool given_ = false;
  bool all_fit_ = true;  // AllToAllv: the data of the ranks before next_ is in their outboxes
  std::optional<Execution> rest_;
};

// Runs one operation on this thread, as drive() does.
Status run_eager(Fabric& fabric, const Operation& op);

}  // namespace moeccl::exec
