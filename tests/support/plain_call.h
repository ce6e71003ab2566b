// SPDX-License-Identifier: Apache-2.0
// The collectives in which every rank has the same count, by number.
#pragma once

#include <moeccl/moeccl.h>

namespace moeccl::testing {

// Makes the call of one rank. c: has op, count, type and root, as the interface takes them. InternalError: c.op is none
// of these collectives.
template <class Call>
moecclResult_t plain_call(const Call& c, moecclRedOp_t reduce, const void* in, void* out, moecclComm_t comm,
                          moecclStream_t s) {
  switch (c.op) {
    case moecclOpAllReduce:
      return moecclAllReduce(in, out, c.count, c.type, reduce, comm, s);
    case moecclOpReduce:
      return moecclReduce(in, out, c.count, c.type, reduce, c.root, comm, s);
    case moecclOpBroadcast:
      return moecclBroadcast(in, out, c.count, c.type, c.root, comm, s);
    case moecclOpAllGather:
      return moecclAllGather(in, out, c.count, c.type, comm, s);
    case moecclOpReduceScatter:
      return moecclReduceScatter(in, out, c.count, c.type, reduce, comm, s);
    case moecclOpAllToAll:
      return moecclAllToAll(in, out, c.count, c.type, comm, s);
    case moecclOpGather:
      return moecclGather(in, out, c.count, c.type, c.root, comm, s);
    case moecclOpScatter:
      return moecclScatter(in, out, c.count, c.type, c.root, comm, s);
    default:
      return moecclInternalError;
  }
}

}  // namespace moeccl::testing
