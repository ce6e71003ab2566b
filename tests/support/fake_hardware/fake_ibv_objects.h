// SPDX-License-Identifier: Apache-2.0
// Declarations that the files of the fake libibverbs share.
#pragma once

#include "src/driver/ibv_abi.h"
#include "tests/support/fake_hardware/script.h"

namespace fake {

struct OpenDevice : moeccl::driver::ibv_abi::Context {
  Nic nic;
  int event_end = -1;  // the end that events are written to
};

// Implemented by the data path: set up its calls in the context of a new device, and end a device.
void opened(OpenDevice* device);
bool are_ports_down();
void closed(OpenDevice* device);

}  // namespace fake
