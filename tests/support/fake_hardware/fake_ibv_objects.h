// SPDX-License-Identifier: Apache-2.0
// Of the fake libibverbs, shared by its files.
#pragma once

#include "src/driver/ibv_abi.h"
#include "tests/support/fake_hardware/script.h"

namespace fake {

struct OpenDevice : moeccl::driver::ibv_abi::Context {
  Nic nic;
  int event_end = -1;  // where events are written
};

// Of the data path: its calls in the context of a new device, and the end of one.
void opened(OpenDevice* device);
void closed(OpenDevice* device);

}  // namespace fake
