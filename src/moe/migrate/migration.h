// SPDX-License-Identifier: Apache-2.0
// Queues of experts that travel while the caller computes: the contract of moeccl/migrate.h without its handles.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "kernels/codec.h"
#include "moeccl/migrate.h"
#include "src/comm/stream.h"
#include "src/exec/cuda/cuda_codec.h"
#include "src/exec/cuda/stream_work.h"
#include "src/moe/hybrid.h"
#include "src/moe/migrate/expert_use.h"
#include "src/moe/rooms.h"

namespace moeccl::comm {

class Migration {
 public:
  // This call is collective on `comm`, which must outlive the result.
  static Result<std::unique_ptr<Migration>> create(const Hybrid& hybrid, Communicator& comm,
                                                   const moecclMigrationConfig_t* config);

  // `update`, if given, runs on each piece before it is encoded; otherwise the experts already have their values.
  Status send(int layer, const void* experts, const void* shared, moecclCodecError_t* errors,
              ExpertUpdate* update = nullptr);
  // What a decoding thread needs. It may run behind the last turn of the gather, so it keeps the communicator alive.
  struct Into {
    const void* shared = nullptr;
    void* held = nullptr;
    std::shared_ptr<const void> communicator;
  };
  // With `into`, a decoding thread decodes the experts into into->held; otherwise wait() decodes them.
  Status begin(int layer, const Into* into = nullptr);
  Status wait_expert(int layer, int index);
  Status wait(int layer, const void* shared, void* held, uint64_t* epoch);
  // Keeps the experts encoded for use_expert().
  Status wait_encoded(int layer, const void* shared, uint64_t* epoch);
  Status use_expert(int layer, int index, const moecclExpertUse_t* use);
  Status test(int layer, int* done);
  Status info(int layer, moecclMigrationInfo_t* info) const;

 private:
  // What every rank sends in the exchange after a gather.
  struct Word {
    uint64_t epoch = 0, checksum = 0;
    int32_t layer = 0, code = moecclSuccess;
  };
  // Encoded experts are in the kind of memory that the caller's experts are in.
  struct Packed {
    Room experts;
    uint64_t checksum = 0;  // of the shared expert
  };
  // One gather, from its begin() until a wait takes it.
  struct Flight {
    Packed packed;
    Room arrived;
    std::vector<Word> words;  // of all ranks
    Word mine;
    exec::Operation gather, exchange;
    uint64_t gather_ticket = 0, exchange_ticket = 0;
    std::optional<Into> into;  // of an entry that is decoded right after its gather
    // What the default stream held before the call: the shared expert in `into` is complete at its end. Null on the
    // host.
    std::shared_ptr<const exec::EarlierWork> earlier;
    // Guarded by mutex_.
    Status status;
    size_t decoded = 0;  // experts
    bool done = false;
  };
  struct Layer {
    std::deque<Packed> to_send;
    std::deque<std::shared_ptr<Flight>> flights;
    uint64_t epoch = 0, begun = 0;
    // The experts that wait_encoded() switched to, and the shared expert that decodes them.
    Room encoded;
    const void* shared = nullptr;
    bool keeps = false;
  };

  Migration(const Hybrid& hybrid, Communicator& comm, const moecclMigrationConfig_t& config);
  Result<Layer*> layer_at(int layer);
  // Returns the codec of the communicator's device; creates it when CUDA memory is first used.
  Result<exec::CudaCodec*> device_codec();
  Result<uint64_t> checksum_of(const void* shared, bool cuda, bool is_complete = false);
  Result<bool> decodes(Flight& flight);
  Status encode(Packed& packed, const void* experts, const void* shared, moecclCodecError_t* errors,
                ExpertUpdate* update);
  Status check_buffers(const void* shared, const void* held) const;
  Status check_kind(int layer, bool cuda, const void* shared, const void* held) const;
  Status check_held(int index) const;
  Result<Flight*> oldest(int number, Layer& layer);
  // Checks that the wait got the same shared expert as the send, in the same kind of memory.
  Status check_shared(int number, const Flight& flight, const void* shared, const void* held);
  // Waits for the oldest gather and removes it from its queue. All ranks get the same Status.
  std::pair<std::shared_ptr<Flight>, Status> take(Layer& layer);
  void switched(Layer& layer, uint64_t* epoch);
  Status decode(Flight& flight, const void* shared, void* held);
  Status run(Flight& flight);
  void finish(Flight& flight, Status status);
  Status verdict(const Flight& flight) const;
  bool exact() const { return codec_.ratio <= 1; }

  Communicator& comm_;
  Hybrid hybrid_;  // a copy, so that the caller may destroy its own
  kernels::CodecShape codec_;
  uint64_t expert_bytes_ = 0;
  uint32_t depth_ = 2;
  std::vector<Layer> layers_;
  Rooms rooms_;  // of entries
  std::unique_ptr<exec::CudaCodec> cuda_codec_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<HostStream> decoder_;  // created when first needed
  HostStream stream_;                    // last, because its thread uses the other members
};

}  // namespace moeccl::comm
