// SPDX-License-Identifier: Apache-2.0
// Send and Recv. Messages between a pair of ranks in one direction follow one another through the pair's message slots.
// Each begins with a header that states its size, so that a receiver that expects another size can report it. If the
// receiver can reach the memory of a large message, it copies the message once, directly from there.
#pragma once

#include "src/exec/runner.h"

namespace moeccl::exec {

struct MessageSlotHeader {
  uint64_t bytes;  // of the whole message
  uint64_t place;  // kAddress, kHeapOffset: where the whole message is
  uint64_t kind;   // MessageKind
  uint64_t type;   // moecclDataType_t
  uint64_t unused[4];
};
static_assert(sizeof(MessageSlotHeader) == 64);
enum MessageKind : uint64_t { kChunks = 0, kAddress = 1, kHeapOffset = 2 };

struct Message {
  uint32_t peer = 0;
  std::byte* data = nullptr;  // a send only reads it
  uint64_t bytes = 0;
  bool is_send = false;
  Runner* runner = nullptr;  // the communicator's runner for the memory of `data`
  moecclDataType_t type = moecclInt8;
  uint8_t priority = 0;  // the communicator's when the call was made

  std::string describe() const;
};

// Begins a message's line in the flight recorder. Returns its number.
size_t record(Fabric& fabric, const Message& message);
// Return how the two ends of a message disagree.
Status sizes_differ(uint64_t sender, uint64_t sent, uint64_t receiver, uint64_t expected);
Status types_differ(uint64_t sender, uint64_t sent, uint64_t receiver, uint64_t expected);
// Checks a message of a rank to itself.
Status check_own(uint32_t rank, const Message& sent, const Message& received);

class MessageTask final : public Task {
 public:
  // `before`: an earlier message of the same pair, direction and group, which goes first; may be null.
  MessageTask(Fabric& fabric, const Message& message, const MessageTask* before)
      : Task(fabric), message_(message), before_(before) {}

  Progress poll() override;
  Status diagnose() override { return {}; }
  std::string describe() const override;
  bool needs(uint32_t peer) const override;
  void let_go() override;
  void abandon() override;

 private:
  Progress send();
  // Fills the peer's slot `number`. If this blocks, it must be called again with the same header, which the task keeps.
  Progress fill_slot(uint32_t number, const MessageSlotHeader& header, uint64_t bytes);
  Progress receive();
  Progress receive_direct(const MessageSlotHeader& header);
  bool direct_possible(uint64_t& kind, uint64_t& place) const;
  uint32_t acknowledged() const;
  Progress done();
  void begin_use();  // uses the engine from now on; called when the first bytes move
  uint32_t message_class() const;
  const MessageSlotHeader* own_slot(uint32_t number) const;
  // Returns how many bytes of a message fit into a slot.
  uint64_t room() const;

  Message message_;
  const MessageTask* before_;
  uint64_t moved_bytes_ = 0;
  MessageSlotHeader header_{};
  uint64_t posted_ = 0;        // number of puts on the link when the last put of this message was posted
  bool header_there_ = false;  // the header of the slot that is being filled has been put
  bool begun_ = false, finished_ = false;
  bool handed_over_ = false;  // send: the last header and signal have gone, also those of a message without bytes
  size_t record_ = 0;         // in the flight recorder; 0: not recorded yet
  bool filled_ = false;       // the next slot is filled and waits for the link to admit it
  transport::EngineUse engine_use_;
  bool direct_ = false;  // send: the receiver copies the data itself; complete once it acknowledges last_number_
  uint32_t last_number_ = 0;
};

// A message from a rank to itself.
class SelfMessageTask final : public Task {
 public:
  SelfMessageTask(Fabric& fabric, const Message& send, const Message& receive)
      : Task(fabric), send_(send), receive_(receive) {}
  Progress poll() override;
  Status diagnose() override { return {}; }
  std::string describe() const override { return "send to itself"; }
  bool needs(uint32_t) const override { return false; }

 private:
  Message send_, receive_;
};

}  // namespace moeccl::exec
