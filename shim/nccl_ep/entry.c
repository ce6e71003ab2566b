/* SPDX-License-Identifier: Apache-2.0 */
/* What a program sees: NCCL EP's symbols. This library needs only libc, so that it changes nothing in the shells and
 * launchers that are preloaded with it, too. The first call loads the core, and with it MoECCL. */
#define _GNU_SOURCE /* dladdr */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "shim/beside.h"
#include "shim/nccl_ep/table.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NCCL_EP_FUNCTION(name, parameters, arguments) \
  static ncclResult_t fail_##name parameters { return ncclSystemError; }
#include "shim/nccl_ep/functions.def"
#undef NCCL_EP_FUNCTION
#pragma GCC diagnostic pop

#define NCCL_EP_FUNCTION(name, parameters, arguments) .name = fail_##name,
static const moecclNcclEpTable kFailures = {
#include "shim/nccl_ep/functions.def"
};
#undef NCCL_EP_FUNCTION

static _Atomic(const moecclNcclEpTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const moecclNcclEpTable* find_core(char* why, size_t why_bytes) {
  void* symbol = symbol_beside(&once, MOECCL_NCCL_EP_CORE, MOECCL_NCCL_EP_CORE_SYMBOL, why, why_bytes);
  if (symbol == NULL) return NULL;
  moecclNcclEpCore_t get;
  *(void**)&get = symbol; /* POSIX's way from an object pointer to a function pointer */
  return get();
}

static void load(void) {
  char why[4096] = "";
  const moecclNcclEpTable* table = find_core(why, sizeof why);
  if (table == NULL) {
    fprintf(stderr,
            "moeccl-nccl-ep: cannot serve NCCL EP's calls, every one will fail: %s. Keep %s beside this library, and "
            "libmoeccl.so where it was installed\n",
            why, MOECCL_NCCL_EP_CORE);
    table = &kFailures;
  }
  atomic_store_explicit(&loaded, table, memory_order_release); /* acquired in table() */
}

static const moecclNcclEpTable* table(void) {
  const moecclNcclEpTable* t = atomic_load_explicit(&loaded, memory_order_acquire); /* released in load() */
  if (__builtin_expect(t != NULL, 1)) return t;
  pthread_once(&once, load);
  return atomic_load_explicit(&loaded, memory_order_acquire);
}

#define NCCL_EP_FUNCTION(name, parameters, arguments) \
  __attribute__((visibility("default"))) ncclResult_t ncclEp##name parameters { return table()->name arguments; }
#include "shim/nccl_ep/functions.def"
