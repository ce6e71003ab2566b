// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/status.h"

namespace moeccl::transport {

// Moves the bytes of those links of one rank that cannot do so themselves, such as sockets. A rank without such links
// has no engine.
class Engine {
 public:
  static constexpr uint32_t kAnyone = ~0u;
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // A thread that drives the rank's operations brackets them with begin() and end(), which may nest, and calls
  // progress() between its polls. While no thread drives, the engine serves its links itself.
  virtual void begin() = 0;
  virtual void end() = 0;
  // Takes in what has arrived and sends what is waiting, but never waits itself. `awaited` is the only rank that can
  // let the caller go on, so that the others need not be checked each time.
  virtual void progress(uint32_t awaited = kAnyone) = 0;
  // The rank's board has changed. Peers learn of it with the next signal to them or within milliseconds; at once if
  // `now`. Called from any thread.
  virtual void board_changed(bool now) = 0;
  // An operation of the class begins or ends: what it moves over shared lines goes before less urgent operations.
  // Called from any thread; several operations may be under way.
  virtual void operation(uint32_t traffic_class, bool begins) = 0;
  // Announces memory that the program will put from again and again, until it takes it back with the same arguments. A
  // network whose NICs must know the memory may register it. Called from any thread.
  virtual void lend(std::byte* base, size_t bytes) { (void)base, (void)bytes; }
  virtual void take_back(std::byte* base, size_t bytes) { (void)base, (void)bytes; }
  // Called after signals of peers were seen, where peers put into device memory (DeviceMemory::landing): what they put
  // before those signals is then there for kernels that start from now on.
  virtual Status flush() { return {}; }
  // Returns whether nothing waits for this rank's own stream, or an error if something will wait forever. While
  // something waits, some thread must drive the engine.
  virtual Result<bool> drained() const { return true; }
  // Returns how large the network's own buffers are.
  virtual size_t memory_bytes() const { return 0; }
};

// One operation's use of an engine. It ends with this object or earlier.
class EngineUse {
 public:
  EngineUse() = default;
  ~EngineUse() { end(); }
  EngineUse(const EngineUse&) = delete;
  EngineUse& operator=(const EngineUse&) = delete;
  void begin(Engine* engine, uint32_t traffic_class) {
    end();
    engine_ = engine;
    traffic_class_ = traffic_class;
    if (engine_ != nullptr) engine_->operation(traffic_class_, true);
  }
  void end() {
    if (engine_ != nullptr) engine_->operation(traffic_class_, false);
    engine_ = nullptr;
  }

 private:
  Engine* engine_ = nullptr;
  uint32_t traffic_class_ = 0;
};

}  // namespace moeccl::transport
