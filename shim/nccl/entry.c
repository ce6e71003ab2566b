/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a preloaded program sees: NCCL's symbols, and nothing else. This library needs only libc, has no constructor and
 * starts no thread. The first NCCL call loads the core, and with it MoECCL and the C++ library, so a program that never
 * calls NCCL only pays for mapping a few pages.
 *
 * Its SONAME is libnccl.so.2: preloaded (or found first in LD_LIBRARY_PATH), it also satisfies the program's own need
 * of that library, so that the symbols of a second NCCL never mix with these.
 */
#define _GNU_SOURCE /* dladdr */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "shim/beside.h"
#include "shim/nccl/table.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT const int moecclNcclShim = NCCL_VERSION_CODE;

#define FAIL(result, name, parameters, arguments, failure) \
  static result fail_##name parameters { return failure; }
#define NCCL_FUNCTION FAIL
#define NCCL_DEVICE_FUNCTION FAIL
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wpedantic" /* `return (void)0` */
#include "shim/nccl/functions.def"
#pragma GCC diagnostic pop
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION

#define MEMBER(result, name, parameters, arguments, failure) .name = fail_##name,
#define NCCL_FUNCTION MEMBER
#define NCCL_DEVICE_FUNCTION MEMBER
static const moecclNcclTable kFailures = {
#include "shim/nccl/functions.def"
};
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION

static _Atomic(const moecclNcclTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const moecclNcclTable* find_core(char* why, size_t why_bytes) {
  void* symbol = symbol_beside(&moecclNcclShim, MOECCL_NCCL_CORE, MOECCL_NCCL_CORE_SYMBOL, why, why_bytes);
  if (symbol == NULL) return NULL;
  moecclNcclCore_t get;
  *(void**)&get = symbol; /* POSIX's way from an object pointer to a function pointer */
  return get();
}

static void load(void) {
  char why[4096] = "";
  const moecclNcclTable* table = find_core(why, sizeof why);
  if (table == NULL) {
    fprintf(stderr,
            "moeccl-nccl: cannot serve NCCL calls, every one will fail: %s. Keep %s beside this library, and "
            "libmoeccl.so where it was installed, or remove the shim from LD_PRELOAD\n",
            why, MOECCL_NCCL_CORE);
    table = &kFailures;
  }
  atomic_store_explicit(&loaded, table, memory_order_release); /* acquired in table() */
}

static inline const moecclNcclTable* table(void) {
  const moecclNcclTable* t = atomic_load_explicit(&loaded, memory_order_acquire); /* released in load() */
  if (__builtin_expect(t != NULL, 1)) return t;
  pthread_once(&once, load);
  return atomic_load_explicit(&loaded, memory_order_acquire);
}

EXPORT const moecclNcclHooks* moecclNcclHooksOfShim(void) { return table()->hooks; }

/* As in NCCL, pnccl* are the functions and nccl* weak aliases, so that a profiler can wrap one with the other. */
#define ENTRY(result, name, parameters, arguments, failure)                \
  EXPORT result pnccl##name parameters { return table()->name arguments; } \
  EXPORT __attribute__((weak, alias("pnccl" #name))) result nccl##name parameters;
#define NCCL_FUNCTION ENTRY
#define NCCL_DEVICE_FUNCTION ENTRY
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include "shim/nccl/functions.def"
#pragma GCC diagnostic pop
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION

EXPORT __attribute__((alias("pncclAlltoAll"))) ncclResult_t pncclAllToAll(const void* send, void* recv, size_t count,
                                                                          ncclDataType_t type, ncclComm_t comm,
                                                                          cudaStream_t stream);
EXPORT __attribute__((weak, alias("pncclAlltoAll"))) ncclResult_t ncclAllToAll(const void* send, void* recv,
                                                                               size_t count, ncclDataType_t type,
                                                                               ncclComm_t comm, cudaStream_t stream);
