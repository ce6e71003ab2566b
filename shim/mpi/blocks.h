// SPDX-License-Identifier: Apache-2.0
// A program's buffer as plain bytes: the buffer itself when its type is contiguous, otherwise packed into separate
// memory.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

namespace moeccl::shim {

struct Shape {
  size_t bytes = 0;    // of an element, without gaps
  bool dense = false;  // elements lie one after another from the first byte on
};
// Returns zeros for anything that is not a type.
Shape shape_of(MPI_Datatype type);

// Returns the bytes of `count` elements of a type without its gaps. Ranks whose calls match in MPI's sense have the
// same payload, whatever types they describe it with.
size_t payload(MPI_Datatype type, size_t count);
// Returns whether elements lie one after another from the first byte on, so that the payload is the memory itself.
bool contiguous(MPI_Datatype type);

// pack() copies `count` elements of `type` at `from` densely to `to`, and unpack() copies them back. Both return false
// when MPI cannot.
bool pack(const void* from, size_t count, MPI_Datatype type, void* to, MPI_Comm comm);
bool unpack(const void* from, void* to, size_t count, MPI_Datatype type, MPI_Comm comm);

// Returns the address of element number n.
inline char* element(const void* base, MPI_Datatype type, ptrdiff_t n) {
  MPI_Aint lower = 0, extent = 0;
  PMPI_Type_get_extent(type, &lower, &extent);
  return static_cast<char*>(const_cast<void*>(base)) + n * extent;
}

// Memory for packed data, without the cost of zeroing it.
using Scratch = std::unique_ptr<char[]>;
inline Scratch scratch(size_t bytes) { return Scratch(new char[bytes > 0 ? bytes : 1]); }

}  // namespace moeccl::shim
