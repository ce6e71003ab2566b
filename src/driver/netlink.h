// SPDX-License-Identifier: Apache-2.0
// What the kernel says of links and routes over rtnetlink (rtnetlink(7)). Unlike /sys, it answers for the network
// namespace of the caller.
#pragma once

#include <map>
#include <string>

namespace moeccl::driver {

// The devices on which this host's interfaces lie. Empty where the kernel does not answer.
class Wires {
 public:
  Wires();
  // See Interface::wire.
  std::string of(const std::string& interface) const;

 private:
  struct Device {
    std::string name, kind;
    int below = 0;       // the index of the device that it lies on
    int elsewhere = -1;  // that device's namespace, if it is another one
  };
  std::map<int, Device> devices_;  // by index
};

}  // namespace moeccl::driver
