/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of version 0.1, compiled with its own headers and with the present ones: offsets and numbers stay, a
 * struct with a size may grow, others may not. */
#include <moeccl/moeccl.h>

#ifdef ABI_SAME
#define GROWS 0
#else
#define GROWS 1
#endif
#define STRUCT(T, bytes, sized) \
  _Static_assert(sizeof(T) == (bytes) || (GROWS && (sized) && sizeof(T) > (bytes)), #T " had " #bytes " bytes");
#define FIELD(T, field, at, bytes)                                          \
  _Static_assert(offsetof(T, field) == (at), #T "." #field " was at " #at); \
  _Static_assert(sizeof(((T*)0)->field) == (bytes), #T "." #field " had " #bytes " bytes");
#define NUMBER(name, number) _Static_assert(name == (number), #name " was " #number);
#include "v0.1/layout.inc"
