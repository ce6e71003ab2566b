// SPDX-License-Identifier: Apache-2.0
// Streams of the emulated driver, and the hardware channels in which their work waits.
#pragma once

#include <array>

#include "tests/support/cuda_emulation/fake_driver.h"

namespace moeccl::emulation::driver {

// Work of the streams that share a channel, in the order in which it was put there. The item at the head starts when
// the work before it on its own stream has ended. It leaves the head when it starts, but a wait leaves the head only
// when it has ended. A stream that waits therefore holds up all later work in the channel, whichever stream that
// belongs to.
struct Channel {
  std::mutex mutex;
  // The streams of the next items. One order, unless the streams of a context share a pool of channels: that is a
  // Channel with an order for each channel of the pool.
  std::vector<std::deque<Stream*>> orders{1};
  // Returns an order that is empty, or the shortest.
  size_t free_order() const;
};

// The channels of a context. Streams take the channels of their priority in turn. As a pool they serve all priorities,
// and a stream without work in a channel takes a free one for its next work; an H100 behaves like this.
struct Channels {
  static constexpr int kPriorities = 6;  // 0 (least) to -5
  std::array<std::vector<std::shared_ptr<Channel>>, kPriorities> of_priority;
  std::array<size_t, kPriorities> taken{};
  std::mutex mutex;
  size_t n = 8;
  std::shared_ptr<Channel> pool;

  std::shared_ptr<Channel> take(int priority);
};

// Room for blocks that run at the same time on a device, counted in the registers that they need.
class Room {
 public:
  static constexpr uint32_t kSms = 64, kRegisters = 65536, kThreads = 2048, kAll = kSms * kRegisters;
  static Room& of(int device);
  // Waits for room. Gives up when the context has failed.
  void take(uint32_t registers, const Context& context);
  void give_back(uint32_t registers);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t free_ = kAll;
};

struct Capture;

// A stream, whose thread runs its work.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  enum class Kind { kMade, kLegacy, kPerThread };
  static std::shared_ptr<Stream> make(Context* context, unsigned flags, int priority, Kind kind);

  // Returns the number of the item.
  uint64_t enqueue(Item item);
  void wait_for(uint64_t number);
  uint64_t submitted();
  bool idle();
  size_t n_queued();  // what has not begun
  // Lets the thread end when it has done all work.
  void end();

  Context* const context;
  const unsigned flags;
  const int priority;
  const Kind kind;
  // Returns whether this stream and the legacy stream wait for each other.
  bool blocking() const { return kind != Kind::kLegacy && (flags & 1u) == 0; }

  std::shared_ptr<Capture> capture;  // under the lock of captures
  std::set<size_t> captured_after;   // nodes that the next node comes after

 private:
  Stream(Context* its_context, unsigned its_flags, int its_priority, Kind its_kind)
      : context(its_context), flags(its_flags), priority(its_priority), kind(its_kind) {}
  void loop();
  void leave_head();
  void run(const Item& item);

  std::shared_ptr<Channel> channel_;
  // Guarded by the channel's lock.
  size_t order_ = 0, n_in_order_ = 0;  // the channel's order that has this stream's work, and how often it is in it
  std::condition_variable work_, done_;
  std::deque<Item> queue_;
  uint64_t put_ = 0, run_ = 0;
  bool ending_ = false;
  bool busy_ = false;
};

Handles<Stream>& streams();
Handles<Event>& events();

// The work of a captured stream, in an order in which one stream may do it.
struct Graph {
  struct Node {
    Item item;
    std::set<size_t> after;
    // Records or waits for an event outside of the graph when the graph is launched; null: the node is `item`.
    std::function<int(const std::shared_ptr<Stream>&)> external = nullptr;
  };
  std::vector<Node> nodes;
};

struct Capture {
  uint64_t id = 0;
  int mode = 0;
  uint64_t thread = 0;
  std::shared_ptr<Stream> origin;
  std::set<std::shared_ptr<Stream>> members;
  bool invalid = false;
  Graph graph;
};
// Puts the item into the graph of the stream's capture, if there is one. Returns 0, or the reason of a refusal.
int capture_item(const std::shared_ptr<Stream>& stream, Item& item, bool* captured);
bool is_captured(const Stream& stream);
// Called before the host waits for a stream or asks for its state.
int refuse_captured(const std::shared_ptr<Stream>& stream);
// Called before the host waits for all streams of a context.
int refuse_capturing_context(const Context* context);
// Adds such a node. Refuses a stream that is not captured.
int capture_external(const std::shared_ptr<Stream>& stream,
                     std::function<int(const std::shared_ptr<Stream>&)> external);
// The same for events that are recorded in a capture, waited for in it, or queried outside of it.
int capture_record(const std::shared_ptr<Stream>& stream, Event& event, bool* captured);
int capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool* captured);
int refuse_captured(const Event& event);
// Destroying a stream invalidates its capture.
void refuse_destroyed(const std::shared_ptr<Stream>& stream);

}  // namespace moeccl::emulation::driver
