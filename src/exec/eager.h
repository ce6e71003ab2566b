// Small operations: the plan `oneshot` without its steps. Every rank puts what it gives into its own outbox, one line
// for all peers, and takes what it needs out of theirs; data and signal arrive together. Which operations run so
// follows from their shape alone, so all ranks agree.
#pragma once

#include <vector>

#include "src/exec/agreed_task.h"

namespace moeccl::exec {

// Bytes that a rank gives in an operation of blocks of `block_bytes`; what fits into an Outbox can run eagerly.
uint64_t eager_bytes(moecclOp_t op, uint32_t n_ranks, uint64_t block_bytes);
bool has_eager_form(moecclOp_t op);

class Eager final : public AgreedTask {
 public:
  Eager(Fabric& fabric, const Operation& op);

  Progress poll() override;
  std::string describe() const override;
  void abandon() override;

 private:
  bool gives() const;            // into its outbox
  bool takes_all() const;        // from every rank, rather than from the root or nobody
  void give();
  Progress look(uint32_t peer);  // kMoved: what it gives is here
  void take();
  const std::byte* data_of(uint32_t rank) const;

  uint64_t block_bytes_;
  uint32_t next_ = 0;  // the ranks before it have given
  bool given_ = false;
};

}  // namespace moeccl::exec
