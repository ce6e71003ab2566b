// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/blocks.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <iterator>
#include <mutex>

namespace moeccl::shim {

namespace {

// How a type was made. From MPI 4 on, only the functions for large counts answer for types of either kind.
#if MPI_VERSION >= 4
struct Made {
  MPI_Count integers = 0, addresses = 0, counts = 0, types = 0;
  int combiner = MPI_COMBINER_NAMED;
};
bool made(MPI_Datatype type, Made* out) {
  return PMPI_Type_get_envelope_c(type, &out->integers, &out->addresses, &out->counts, &out->types, &out->combiner) ==
         MPI_SUCCESS;
}
// Returns a repeated type's inner type, and how often it is repeated.
bool inner_of(MPI_Datatype type, const Made& how, MPI_Datatype* inner, MPI_Count* count) {
  int small_count = 1;
  MPI_Aint no_address = 0;
  MPI_Count large_count = 1;
  if (PMPI_Type_get_contents_c(type, how.integers, 0, how.counts, 1, &small_count, &no_address, &large_count, inner) !=
      MPI_SUCCESS)
    return false;
  *count = how.counts > 0 ? large_count : small_count;
  return true;
}
#else
struct Made {
  int integers = 0, addresses = 0, types = 0, combiner = MPI_COMBINER_NAMED;
};
bool made(MPI_Datatype type, Made* out) {
  return PMPI_Type_get_envelope(type, &out->integers, &out->addresses, &out->types, &out->combiner) == MPI_SUCCESS;
}
bool inner_of(MPI_Datatype type, const Made& how, MPI_Datatype* inner, MPI_Count* count) {
  int repeats = 1;
  MPI_Aint no_address = 0;
  if (PMPI_Type_get_contents(type, how.integers, 0, 1, &repeats, &no_address, inner) != MPI_SUCCESS) return false;
  *count = repeats;
  return true;
}
#endif

// Predefined types are never freed, and their handles are never given to another type.
bool is_predefined(int combiner) {
#if MPI_VERSION > 4 || (MPI_VERSION == 4 && MPI_SUBVERSION >= 1)
  if (combiner == MPI_COMBINER_VALUE_INDEX) return true;
#endif
  return combiner == MPI_COMBINER_NAMED || combiner == MPI_COMBINER_F90_REAL || combiner == MPI_COMBINER_F90_COMPLEX ||
         combiner == MPI_COMBINER_F90_INTEGER;
}

// Returns the shape of a type that MPI_Type_contiguous or MPI_Type_dup made.
Shape shape_of_repeated(MPI_Datatype type, const Made& how) {
  MPI_Count count = 1;
  MPI_Datatype inner = MPI_DATATYPE_NULL;
  if (!inner_of(type, how, &inner, &count)) return {};
  const Shape one = shape_of(inner);
  Made inner_made;
  if (made(inner, &inner_made) && !is_predefined(inner_made.combiner)) {
    PMPI_Type_free(&inner);  // the contents of a type are new handles
  }
  return {one.bytes * static_cast<size_t>(count), one.dense};
}

// A dense type of so many bytes, which may be more than an int counts. MPI_PACKED matches any type.
class DenseType {
 public:
  explicit DenseType(size_t bytes) {
    constexpr size_t kChunk = size_t{1} << 30;
    MPI_Datatype chunk = MPI_DATATYPE_NULL;
    if (PMPI_Type_contiguous(static_cast<int>(kChunk), MPI_PACKED, &chunk) != MPI_SUCCESS) return;
    const int counts[] = {static_cast<int>(bytes / kChunk), static_cast<int>(bytes % kChunk)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes - bytes % kChunk)};
    const MPI_Datatype types[] = {chunk, MPI_PACKED};
    if (PMPI_Type_create_struct(2, counts, places, types, &type_) == MPI_SUCCESS) PMPI_Type_commit(&type_);
    PMPI_Type_free(&chunk);
  }
  ~DenseType() {
    if (type_ != MPI_DATATYPE_NULL) PMPI_Type_free(&type_);
  }
  DenseType(const DenseType&) = delete;
  DenseType& operator=(const DenseType&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

// Copies one element between two types of the same payload, by a message to this rank itself.
bool copy_by_message(const void* from, MPI_Datatype from_type, void* to, MPI_Datatype to_type) {
  // A communicator of the shim's own, because the program's receives on MPI_COMM_SELF would match as well, and for one
  // thread at a time.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  MPI_Comm self = MPI_COMM_NULL;
  if (from_type == MPI_DATATYPE_NULL || to_type == MPI_DATATYPE_NULL ||
      PMPI_Comm_split(MPI_COMM_SELF, 0, 0, &self) != MPI_SUCCESS) {  // copies no attributes, as a duplicate would
    return false;
  }
  PMPI_Comm_set_errhandler(self, MPI_ERRORS_RETURN);
  const bool good =
      PMPI_Sendrecv(from, 1, from_type, 0, 0, to, 1, to_type, 0, 0, self, MPI_STATUS_IGNORE) == MPI_SUCCESS;
  PMPI_Comm_free(&self);
  return good;
}

// Packs elements into dense memory, or unpacks them from there. MPI_Pack writes them one after another in the machine's
// own form on hosts that are alike, as the hosts of one MoECCL communicator are. Its positions are of type int, so
// large data is packed in pieces, and an element that is larger by itself goes another way.
bool convert(bool packs, void* elements, size_t count, MPI_Datatype type, void* dense, MPI_Comm comm) {
  const size_t size = payload(type, 1);
  if (size == 0 || count == 0) return true;
  if (contiguous(type)) {
    std::memcpy(packs ? dense : elements, packs ? elements : dense, size * count);
    return true;
  }
  const size_t piece = std::max<size_t>(1, (size_t{1} << 30) / size);
  for (size_t done = 0; done < count; done += piece) {
    const size_t n = std::min(piece, count - done);
    const size_t bytes = size * n;
    char* place = element(elements, type, static_cast<ptrdiff_t>(done));
    char* packed = static_cast<char*>(dense) + size * done;
    if (bytes > INT_MAX) {
      const DenseType whole(size);
      if (!(packs ? copy_by_message(place, type, packed, whole.get())
                  : copy_by_message(packed, whole.get(), place, type)))
        return false;
      continue;
    }
    const int n_packed = static_cast<int>(bytes), n_elements = static_cast<int>(n);
    int position = 0;
    const int code = packs ? PMPI_Pack(place, n_elements, type, packed, n_packed, &position, comm)
                           : PMPI_Unpack(packed, n_packed, &position, place, n_elements, type, comm);
    if (code != MPI_SUCCESS || position != n_packed) return false;
  }
  return true;
}

}  // namespace

// Asks MPI, and caches the answer for predefined types, whose handles are never given to another type.
Shape shape_of(MPI_Datatype type) {
  struct Known {
    MPI_Datatype type = MPI_DATATYPE_NULL;
    Shape shape;
  };
  thread_local Known known[4];
  thread_local unsigned next = 0;
  for (const Known& k : known) {
    if (k.type == type && type != MPI_DATATYPE_NULL) return k.shape;
  }
  Made how;
  MPI_Count size = 0;  // may exceed an int
  MPI_Aint lower = 0, extent = 0;
  if (PMPI_Type_size_x(type, &size) != MPI_SUCCESS) return {};
  const bool known_kind = made(type, &how);
  if (known_kind && (how.combiner == MPI_COMBINER_CONTIGUOUS || how.combiner == MPI_COMBINER_DUP))
    return shape_of_repeated(type, how);
  const bool predefined = known_kind && is_predefined(how.combiner);
  // Pairs such as MPI_DOUBLE_INT are predefined, too, and have a gap.
  const bool dense =
      predefined && PMPI_Type_get_extent(type, &lower, &extent) == MPI_SUCCESS && lower == 0 && extent == size;
  const Shape shape = {static_cast<size_t>(size), dense};
  if (predefined) known[next++ % std::size(known)] = {type, shape};
  return shape;
}

size_t payload(MPI_Datatype type, size_t count) { return shape_of(type).bytes * count; }

bool contiguous(MPI_Datatype type) { return shape_of(type).dense; }

bool pack(const void* from, size_t count, MPI_Datatype type, void* to, MPI_Comm comm) {
  return convert(true, const_cast<void*>(from), count, type, to, comm);
}

bool unpack(const void* from, void* to, size_t count, MPI_Datatype type, MPI_Comm comm) {
  return convert(false, to, count, type, const_cast<void*>(from), comm);
}

}  // namespace moeccl::shim
