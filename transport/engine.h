// SPDX-License-Identifier: Apache-2.0
// What moves the bytes of links that cannot do so alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/status.h"

namespace moeccl::transport {

// What moves the bytes of those links of one rank that cannot do so alone: sockets. A rank without such links has none.
class Engine {
 public:
  static constexpr uint32_t kAnyone = ~0u;
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // A thread that drives the rank's operations says so, and calls progress() between its polls; without one the engine
  // looks after its links itself. begin() and end() may nest.
  virtual void begin() = 0;
  virtual void end() = 0;
  // Takes what has arrived and sends what waits. Never waits itself. `awaited`: the only rank that can let the caller
  // go on, so that others need not be looked at each time.
  virtual void progress(uint32_t awaited = kAnyone) = 0;
  // The rank's board has changed. Peers learn it with the next signal to them, or within milliseconds; `now`: at once.
  // Any thread.
  virtual void board_changed(bool now) = 0;
  // An operation of the class begins or ends: what it moves over lines that are shared comes before less urgent ones'.
  // Any thread; several may be under way.
  virtual void operation(uint32_t traffic_class, bool begins) = 0;
  // Memory that the program will put from again and again, until it takes it back with the same arguments: a network
  // whose NICs must know it may register it. Any thread.
  virtual void lend(std::byte* base, size_t bytes) { (void)base, (void)bytes; }
  virtual void take_back(std::byte* base, size_t bytes) { (void)base, (void)bytes; }
  // After signals of peers were seen, where they put into device memory (DeviceMemory::landing): what they have put
  // before will be there for kernels that start from now on.
  virtual Status flush() { return {}; }
  // Whether nothing waits for this rank's own stream, or why it never will. While it does, somebody must drive the
  // engine.
  virtual Result<bool> drained() const { return true; }
};

// One operation's use of an engine, which ends with this object or before.
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
