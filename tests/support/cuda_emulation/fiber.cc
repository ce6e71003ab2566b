// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_emulation/fiber.h"

#include <sys/mman.h>

#include <cstdlib>

#include "tests/support/cuda_emulation/thread_sanitizer.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1  // clang has another macro
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace moeccl::emulation {
namespace {

// The thread sanitizer writes its reports on the stack of the thread that raced.
constexpr size_t kStackBytes = (tsan::kOn ? 1024 : 128) << 10, kGuardBytes = 4096;

}  // namespace

#if defined(__x86_64__)

// Saves the callee-saved registers on the old stack, stores its pointer, and switches to the other stack.
extern "C" void moeccl_emulation_switch(void** from, void* to);
asm(R"(
.text
.globl moeccl_emulation_switch
.hidden moeccl_emulation_switch
.type moeccl_emulation_switch, @function
moeccl_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size moeccl_emulation_switch, .-moeccl_emulation_switch
)");

namespace {
// The first switch into a fiber returns here; r12 holds the fiber.
extern "C" void moeccl_emulation_first(void);
asm(R"(
.text
.globl moeccl_emulation_first
.hidden moeccl_emulation_first
.type moeccl_emulation_first, @function
moeccl_emulation_first:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size moeccl_emulation_first, .-moeccl_emulation_first
)");
}  // namespace

Fiber::Fiber() {
  stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) std::abort();
  (void)mprotect(stack_, kGuardBytes, PROT_NONE);
  auto** top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kStackBytes);
  // The stack looks as if moeccl_emulation_switch had saved them: r15 r14 r13 r12 rbx rbp, then the return address. It
  // is aligned for the call in moeccl_emulation_first.
  void** sp = top - 9;
  sp[0] = sp[1] = sp[2] = nullptr;
  sp[3] = this;
  sp[4] = reinterpret_cast<void*>(&Fiber::enter);
  sp[5] = nullptr;
  sp[6] = reinterpret_cast<void*>(&moeccl_emulation_first);
  sp[7] = sp[8] = nullptr;
  context_ = sp;
}

static void swap(void** from, void* to) { moeccl_emulation_switch(from, to); }

#else

Fiber::Fiber() {
  stack_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack_ == MAP_FAILED) std::abort();
  auto* own = new ucontext_t;
  getcontext(own);
  own->uc_stack.ss_sp = stack_;
  own->uc_stack.ss_size = kStackBytes;
  own->uc_link = nullptr;
  const auto bits = reinterpret_cast<uintptr_t>(this);
  makecontext(own, reinterpret_cast<void (*)()>(+[](unsigned low, unsigned high) {
                enter(reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low));
              }),
              2, static_cast<unsigned>(bits), static_cast<unsigned>(bits >> 32));
  context_ = own;
  caller_ = new ucontext_t;
}

static void swap(void** from, void* to) { swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to)); }

#endif

Fiber::~Fiber() {
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(context_);
  delete static_cast<ucontext_t*>(caller_);
#endif
  munmap(stack_, kStackBytes);
}

void Fiber::enter(Fiber* self) { self->loop(); }

void Fiber::loop() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &caller_stack_, &caller_bytes_);
#endif
  while (true) {
    body_(argument_);
    running_ = false;
    yield();
  }
}

void Fiber::resume(void* as) {
  caller_thread_ = tsan::this_thread();
  tsan::become(as);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&caller_fake_, stack_, kStackBytes);
#endif
  swap(&caller_, context_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(caller_fake_, nullptr, nullptr);
#endif
}

void Fiber::yield() {
  tsan::become(caller_thread_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_, caller_stack_, caller_bytes_);
#endif
  swap(&context_, caller_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_, &caller_stack_, &caller_bytes_);
#endif
}

}  // namespace moeccl::emulation
