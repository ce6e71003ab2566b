// Queues of experts that travel while the caller computes: the contract of moeccl/migrate.h without its handles.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/codec.h"
#include "moeccl/migrate.h"
#include "src/comm/hybrid.h"
#include "src/comm/stream.h"

namespace moeccl::comm {

class Migration {
 public:
  // Collective on `comm`, which outlives it.
  static Result<std::unique_ptr<Migration>> create(const Hybrid& hybrid, Communicator& comm,
                                                   const moecclMigrationConfig_t* config);

  Status send(int layer, const void* experts, const void* shared, moecclCodecError_t* errors);
  Status begin(int layer);
  Status wait(int layer, const void* shared, void* held, uint64_t* epoch);
  Status test(int layer, int* done);
  Status info(int layer, moecclMigrationInfo_t* info) const;

 private:
  // What every rank says behind a gather.
  struct Word {
    uint64_t epoch = 0, checksum = 0;
    int32_t layer = 0, code = moecclSuccess;
  };
  struct Packed {
    std::vector<std::byte> experts;
    uint64_t checksum = 0;  // of the shared expert
  };
  // One gather from its beginning until it is waited for.
  struct Flight {
    Packed packed;
    std::vector<std::byte> arrived;
    std::vector<Word> words;  // of all ranks
    Word mine;
    exec::Operation gather, exchange;
    Status status;
    bool done = false;  // guarded by mutex_
  };
  struct Layer {
    std::deque<Packed> to_send;
    std::deque<std::shared_ptr<Flight>> flights;
    uint64_t epoch = 0, begun = 0;
  };

  Migration(const Hybrid& hybrid, Communicator& comm, const moecclMigrationConfig_t& config);
  Result<Layer*> layer_at(int layer);
  uint64_t checksum_of(const void* shared) const;
  Status run(Flight& flight, uint64_t gather_ticket, uint64_t exchange_ticket);
  Status verdict(const Flight& flight) const;
  bool exact() const { return codec_.ratio <= 1; }

  Communicator& comm_;
  Hybrid hybrid_;  // its own, so that the caller's may go
  kernels::CodecShape codec_;
  uint64_t expert_bytes_ = 0;
  uint32_t depth_ = 2;
  std::vector<Layer> layers_;
  std::vector<std::vector<std::byte>> spare_;  // memory of entries that are done
  std::mutex mutex_;
  std::condition_variable changed_;
  HostStream stream_;  // last: its thread uses the others
};

}  // namespace moeccl::comm
