// SPDX-License-Identifier: Apache-2.0
// What the links of one rank share: rails, registered memory, completions. The thread that drives the rank's operations
// polls between its own polls. The engine's thread, which otherwise sleeps, takes the events of devices, finishes what
// a drive left behind, and sends signs of life while operations run, so that a lost peer is noticed. When a peer's NIC
// acknowledges nothing, it asks whether the peer's process still exists.
//
// What arrives does not need this rank: words and bytes land by themselves.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "src/driver/poller.h"
#include "transport/common/ordered_engine.h"
#include "transport/common/presence.h"
#include "transport/verbs/verbs_link.h"

namespace moeccl::transport::verbs {

// What the engine owns until it ends, in the order in which it was made.
struct EngineParts {
  std::unique_ptr<driver::IbvApi> api;
  std::vector<std::unique_ptr<Rail>> rails;
  std::unique_ptr<Regions> regions;
  std::vector<std::unique_ptr<Region>> own;  // staging, signals, copies, rings, records
  std::unique_ptr<DeviceRegions> device;     // null: the NICs do not access CUDA memory
  size_t memory_bytes = 0;                   // of copies, rings and records
  Presence presence;
  Questions questions;  // after the peers
};

class VerbsEngine final : public OrderedEngine {
 public:
  static Result<std::unique_ptr<VerbsEngine>> create(EngineParts&& parts);
  // Tells the peers what they do not know yet, as far as possible within a second, and gives everything back. The links
  // are of no use afterwards and must be destroyed later.
  ~VerbsEngine() override;

  // Called before start(); the caller owns the link. The ids of all queue pairs must differ, and be small.
  std::unique_ptr<VerbsLink> add(LinkSetting setting, std::vector<Lane> lanes);

  size_t memory_bytes() const override { return parts_.memory_bytes; }
  void begin() override;
  void end() override;
  void progress(uint32_t awaited = kAnyone) override;
  void board_changed(bool now) override;
  Status flush() override;

  void lend(std::byte* base, size_t bytes) override { regions_->lend(base, bytes); }
  void take_back(std::byte* base, size_t bytes) override { regions_->take_back(base, bytes); }

 private:
  friend class VerbsLink;
  VerbsEngine(EngineParts parts, driver::WakeUp wake);

  void step() override;
  void wake() override { wake_.signal(); }
  void tell_boards() override;
  bool unsent() override { return !waiting_.empty(); }
  void lose_all(const Status& why) noexcept override {
    for (VerbsLink* link : links_) link->lose(why);
  }
  // Under the lock:
  void poll();             // takes completions
  void turn();             // completions, then what waited for them
  void look(bool events);  // events, memory that went away, signs of life
  void queue(VerbsLink& link);
  void find_silent(int64_t now);
  // Without it, because it waits for answers. Only the thread calls it, and finds out afterwards whether it may sleep:
  // a drive that begins or ends meanwhile does not wake it.
  void ask();
  // Returns whether something still has to be posted or completed, and a peer is there to take it.
  bool undelivered(bool also_to_failed) const;

  struct Place {
    VerbsLink* link = nullptr;
    uint32_t lane = 0;
  };
  EngineParts parts_;
  Regions* regions_;
  driver::WakeUp wake_;
  std::vector<VerbsLink*> links_, waiting_, turn_of_;
  std::vector<Place> queues_;    // by id
  std::vector<pollfd> entries_;  // wake_, the presence, then the rails' events
  bool events_ = true;           // there may be some
  std::atomic<bool> asleep_{false};
  std::atomic<bool> left_over_{false};  // a drive has left something to the thread
  int64_t signs_ns_ = 0;                // when signs of life were last sent
  int listener_;                        // of the presence; -1: none that works
  int64_t answered_ns_ = 0;             // when it was last looked at
};

}  // namespace moeccl::transport::verbs
