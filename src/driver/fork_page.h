// Whether this process was forked after its library state was made. A page that the kernel wipes in children answers
// with one load, where getpid() would cost a system call in every operation.
#pragma once

#include <cstdint>

namespace moeccl::driver {

// Points to 1 in the process that called first, to 0 in its children. Never null.
const volatile uint32_t* fork_page();

}  // namespace moeccl::driver
