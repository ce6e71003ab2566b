// SPDX-License-Identifier: Apache-2.0
// Entry point: the messages of a group.
#include "kernels/cuda/messages.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_messages, MessagesArgs) { run_messages(a); }
