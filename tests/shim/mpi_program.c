/* SPDX-License-Identifier: Apache-2.0 */
/* An ordinary MPI program: the collectives that the shim serves, in their plain, in-place and derived-type forms, with
 * known results. Prints "rank R of N: all right" or what was wrong. With "large", it exchanges more than 2^31 elements
 * instead, and with "element" one element of more than 2^31 bytes. */
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, n, bad;

static void expect(int good, const char* what, int where) {
  if (good || bad++ > 5) return;
  fprintf(stderr, "rank %d: %s is wrong at %d\n", rank, what, where);
}

enum { kCount = 1001 };
static int value(int r, int i) { return (i * 7 + r * 3) % 11 + 1; }

static void reductions(MPI_Comm comm) {
  double in[kCount], out[kCount];
  int sum[kCount];
  for (int i = 0; i < kCount; ++i) in[i] = value(rank, i), sum[i] = value(rank, i);
  MPI_Allreduce(in, out, kCount, MPI_DOUBLE, MPI_MAX, comm);
  MPI_Allreduce(MPI_IN_PLACE, sum, kCount, MPI_INT, MPI_SUM, comm);
  for (int i = 0; i < kCount; ++i) {
    int max = 0, total = 0;
    for (int r = 0; r < n; ++r) total += value(r, i), max = value(r, i) > max ? value(r, i) : max;
    expect(out[i] == max, "Allreduce MAX", i);
    expect(sum[i] == total, "Allreduce SUM in place", i);
  }
  long longs[kCount];
  for (int i = 0; i < kCount; ++i) longs[i] = value(rank, i);
  MPI_Reduce(rank == n - 1 ? MPI_IN_PLACE : longs, rank == n - 1 ? longs : NULL, kCount, MPI_LONG, MPI_PROD, n - 1,
             comm);
  for (int i = 0; i < kCount && rank == n - 1; ++i) {
    long product = 1;
    for (int r = 0; r < n; ++r) product *= value(r, i);
    expect(longs[i] == product, "Reduce PROD in place", i);
  }
  /* MPI refuses the same buffer for input and output without MPI_IN_PLACE. */
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* where Open MPI reports some of them */
  expect(MPI_Allreduce(sum, sum, kCount, MPI_INT, MPI_SUM, comm) != MPI_SUCCESS, "Allreduce of one buffer", 0);
  if (rank == 0)
    expect(MPI_Reduce(sum, sum, kCount, MPI_INT, MPI_SUM, 0, comm) != MPI_SUCCESS, "Reduce of one buffer", 0);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_ARE_FATAL);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  /* Reductions that MoECCL does not support stay with MPI. */
  short bits = (short)(1 << rank), all = 0;
  MPI_Allreduce(&bits, &all, 1, MPI_SHORT, MPI_BOR, comm);
  expect(all == (1 << n) - 1, "Allreduce BOR of shorts", 0);
  float* wide = malloc(sizeof(float) * (size_t)(n * kCount));
  float* again = malloc(sizeof(float) * (size_t)(n * kCount));
  float mine[kCount];
  for (int i = 0; i < n * kCount; ++i) wide[i] = again[i] = (float)value(rank, i);
  MPI_Reduce_scatter_block(wide, mine, kCount, MPI_FLOAT, MPI_SUM, comm);
  MPI_Reduce_scatter_block(MPI_IN_PLACE, again, kCount, MPI_FLOAT, MPI_SUM, comm);
  for (int i = 0; i < kCount; ++i) {
    float total = 0;
    for (int r = 0; r < n; ++r) total += (float)value(r, rank * kCount + i);
    expect(mine[i] == total, "Reduce_scatter_block", i);
    expect(again[i] == total, "Reduce_scatter_block in place", i);
  }
  for (int i = kCount; i < n * kCount; ++i) expect(again[i] == (float)value(rank, i), "Reduce_scatter_block's rest", i);
  free(wide), free(again);
}

/* The root sends every third element of a matrix row by a derived type; the others receive plain ints. */
static void broadcasts(MPI_Comm comm) {
  int plain[kCount];
  for (int i = 0; i < kCount; ++i) plain[i] = value(rank, i);
  MPI_Bcast(plain, kCount, MPI_INT, n - 1, comm);
  for (int i = 0; i < kCount; ++i) expect(plain[i] == value(n - 1, i), "Bcast", i);
  MPI_Datatype third;
  MPI_Type_vector(100, 1, 3, MPI_INT, &third);
  MPI_Type_commit(&third);
  int spread[300], dense[100];
  for (int i = 0; i < 300; ++i) spread[i] = i;
  if (rank == 0) {
    MPI_Bcast(spread, 1, third, 0, comm);
  } else {
    MPI_Bcast(dense, 100, MPI_INT, 0, comm);
    for (int i = 0; i < 100; ++i) expect(dense[i] == 3 * i, "Bcast of a vector", i);
  }
  MPI_Type_free(&third);
  struct {
    double d;
    int i;
  } pair = {rank, rank}; /* a named type with a gap at its end */
  MPI_Bcast(&pair, 1, MPI_DOUBLE_INT, 1, comm);
  expect(pair.d == 1 && pair.i == 1, "Bcast of DOUBLE_INT", 0);
}

static void exchanges(MPI_Comm comm) {
  int* all = malloc(sizeof(int) * (size_t)(n * kCount));
  int* in = malloc(sizeof(int) * (size_t)(n * kCount));
  for (int i = 0; i < n * kCount; ++i) in[i] = value(rank, i);
  MPI_Allgather(in, kCount, MPI_INT, all, kCount, MPI_INT, comm);
  for (int i = 0; i < n * kCount; ++i) expect(all[i] == value(i / kCount, i % kCount), "Allgather", i);
  memset(all, 0, sizeof(int) * (size_t)(n * kCount));
  memcpy(all + rank * kCount, in, sizeof(int) * kCount);
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, kCount, MPI_INT, comm);
  for (int i = 0; i < n * kCount; ++i) expect(all[i] == value(i / kCount, i % kCount), "Allgather in place", i);
  MPI_Alltoall(in, kCount, MPI_INT, all, kCount, MPI_INT, comm);
  for (int i = 0; i < n * kCount; ++i) {
    expect(all[i] == value(i / kCount, rank * kCount + i % kCount), "Alltoall", i);
  }
  MPI_Alltoall(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, in, kCount, MPI_INT, comm);
  expect(memcmp(in, all, sizeof(int) * (size_t)(n * kCount)) == 0, "Alltoall in place", 0);

  /* A distributed transposition: rows of blocks are sent, columns are received. */
  MPI_Datatype column, resized;
  double* matrix = malloc(sizeof(double) * (size_t)(n * n));
  double* columns = malloc(sizeof(double) * (size_t)(n * n));
  MPI_Type_vector(n, 1, n, MPI_DOUBLE, &column);
  MPI_Type_create_resized(column, 0, sizeof(double), &resized);
  MPI_Type_commit(&resized);
  for (int i = 0; i < n * n; ++i) matrix[i] = rank * 1000 + i, columns[i] = -1;
  MPI_Alltoall(matrix, n, MPI_DOUBLE, columns, 1, resized, comm);
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < n; ++i) expect(columns[i * n + r] == r * 1000 + rank * n + i, "Alltoall into columns", i);
  }
  for (int i = 0; i < n * n; ++i) columns[i] = -1;
  MPI_Allgather(matrix, n, MPI_DOUBLE, columns, 1, resized, comm);
  for (int i = 0; i < n; ++i) expect(columns[i * n + n - 1] == (n - 1) * 1000 + i, "Allgather into columns", i);
  MPI_Type_free(&column), MPI_Type_free(&resized);

  /* Uneven blocks, with gaps, and empty for some ranks. */
  int counts_out[64], counts_in[64], at_out[64], at_in[64];
  for (int r = 0; r < n; ++r) {
    counts_out[r] = (rank + 2 * r) % 5 * 10;
    counts_in[r] = (r + 2 * rank) % 5 * 10;
    at_out[r] = r * 50;
    at_in[r] = (n - 1 - r) * 60;
  }
  int from[64 * 50], to[64 * 60];
  for (int i = 0; i < n * 50; ++i) from[i] = rank * 10000 + i;
  for (int i = 0; i < n * 60; ++i) to[i] = -1;
  MPI_Alltoallv(from, counts_out, at_out, MPI_INT, to, counts_in, at_in, MPI_INT, comm);
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < 60; ++i) {
      const int want = i < counts_in[r] ? r * 10000 + rank * 50 + i : -1;
      expect(to[at_in[r] + i] == want, "Alltoallv", at_in[r] + i);
    }
  }
  /* Nothing lies at the places of empty blocks. */
  for (int r = 0; r < n; ++r) {
    if (counts_out[r] == 0) at_out[r] = -2147483647;
    if (counts_in[r] == 0) at_in[r] = r % 2 == 0 ? 2147483647 : -1;
  }
  for (int i = 0; i < n * 60; ++i) to[i] = -1;
  MPI_Alltoallv(from, counts_out, at_out, MPI_INT, to, counts_in, at_in, MPI_INT, comm);
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < counts_in[r]; ++i) {
      expect(to[at_in[r] + i] == r * 10000 + rank * 50 + i, "Alltoallv with empty blocks", at_in[r] + i);
    }
  }
  /* One array: its own part is sent, and what comes goes behind it. */
  for (int r = 0; r < n; ++r) counts_in[r] = 10, at_out[r] = r * 10, at_in[r] = (n + r) * 10;
  for (int i = 0; i < 2 * n * 10; ++i) to[i] = i < n * 10 ? rank * 10000 + i : -1;
  MPI_Alltoallv(to, counts_in, at_out, MPI_INT, to, counts_in, at_in, MPI_INT, comm);
  for (int i = 0; i < 2 * n * 10; ++i) {
    const int want = i < n * 10 ? rank * 10000 + i : (i / 10 - n) * 10000 + rank * 10 + i % 10;
    expect(to[i] == want, "Alltoallv within one array", i);
  }
  /* In place: the data to r and the data from r have the same length. */
  for (int r = 0; r < n; ++r) counts_in[r] = rank + r + 1, at_in[r] = r * 60;
  for (int i = 0; i < n * 60; ++i) to[i] = rank * 10000 + i;
  MPI_Alltoallv(MPI_IN_PLACE, NULL, NULL, MPI_DATATYPE_NULL, to, counts_in, at_in, MPI_INT, comm);
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < 60; ++i) {
      const int want = i < counts_in[r] ? r * 10000 + rank * 60 + i : rank * 10000 + r * 60 + i;
      expect(to[r * 60 + i] == want, "Alltoallv in place", r * 60 + i);
    }
  }
  free(all), free(in), free(matrix), free(columns);
}

static void everything(MPI_Comm comm) {
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &n);
  reductions(comm);
  if (n > 1) broadcasts(comm);
  exchanges(comm);
}

/* Calls between the groups of an intercommunicator stay with MPI. */
static void between_groups(void) {
  int world_rank, world_size;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (world_size < 2) return;
  MPI_Comm half, inter;
  const int color = world_rank % 2;
  MPI_Comm_split(MPI_COMM_WORLD, color, 0, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - color, 7, &inter);
  int one = color == 0 ? 1 : 100, sum = 0, remote = 0;
  MPI_Comm_remote_size(inter, &remote);
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, inter);
  expect(sum == remote * (color == 0 ? 100 : 1), "Allreduce between groups", 0);
  MPI_Comm_free(&inter), MPI_Comm_free(&half);
}

/* MPI reuses the handle of a freed object for the next communicator or type, with other ranks or another size. */
static void handles_again(void) {
  int world_rank, world_size;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  for (int round = 0; round < 6; ++round) {
    const int parts = round % 2 + 1, color = world_rank % parts;
    MPI_Comm comm;
    MPI_Comm_split(MPI_COMM_WORLD, color, round % 3 == 0 ? -world_rank : world_rank, &comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &n);
    int expected = 0;
    for (int r = color; r < world_size; r += parts) expected += r + 1;
    for (int call = 0; call < 12; ++call) { /* the shim takes over in between */
      int one = world_rank + 1, sum = 0;
      MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
      expect(sum == expected, "Allreduce on a handle that was another communicator's", round);
    }
    MPI_Datatype type; /* 1 to 3 ints of 4 */
    const int filled = round % 3 + 1;
    MPI_Type_create_resized(MPI_INT, 0, 4 * sizeof(int), &type);
    MPI_Type_free(&type);
    MPI_Datatype ints;
    MPI_Type_contiguous(filled, MPI_INT, &ints);
    MPI_Type_create_resized(ints, 0, 4 * sizeof(int), &type);
    MPI_Type_commit(&type);
    int* in = calloc((size_t)n * 4, sizeof(int));
    int* out = calloc((size_t)n * 4, sizeof(int));
    for (int i = 0; i < 4 * n; ++i) in[i] = value(rank, i);
    MPI_Alltoall(in, 1, type, out, 1, type, comm);
    for (int r = 0; r < n; ++r) {
      for (int i = 0; i < 4; ++i)
        expect(out[4 * r + i] == (i < filled ? value(r, 4 * rank + i) : 0), "a type on another one's handle", round);
    }
    free(in), free(out);
    MPI_Type_free(&type), MPI_Type_free(&ints);
    MPI_Comm_free(&comm);
  }
}

/* More than 2^31 elements of a derived type on all ranks together, and more than a call of MPI_Pack takes on one. */
static void large(void) {
  const int count = (1 << 30) + 3;
  const size_t block = (size_t)count, all = block * (size_t)n, mine = block * (size_t)rank;
  char* data = calloc(all, 1);
  MPI_Datatype one;
  MPI_Type_create_resized(MPI_CHAR, 0, 1, &one); /* the shim packs it */
  MPI_Type_commit(&one);
  data[mine] = (char)(rank + 1), data[mine + block - 1] = (char)(rank + 11);
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, count, one, MPI_COMM_WORLD);
  for (int r = 0; r < n; ++r) {
    expect(data[(size_t)r * block] == r + 1, "Allgather of 2^31 elements, first of the block", r);
    expect(data[(size_t)(r + 1) * block - 1] == r + 11, "Allgather of 2^31 elements, last of the block", r);
  }
  memset(data, 0, all);
  const int most = 2147483647;
  if (rank == 0) data[most - 1] = 5;
  MPI_Bcast(data, most, one, 0, MPI_COMM_WORLD);
  expect(data[most - 1] == 5, "Bcast of 2^31 - 1 elements", most - 1);
  MPI_Type_free(&one);
  /* One element of more than 2^31 bytes. */
  MPI_Datatype part, whole;
  MPI_Type_contiguous(count, MPI_CHAR, &part);
  MPI_Type_contiguous(n, part, &whole);
  MPI_Type_commit(&whole);
  if (rank == 0) data[all - 1] = 7;
  MPI_Bcast(data, 1, whole, 0, MPI_COMM_WORLD);
  expect(data[all - 1] == 7, "Bcast of one large element", 0);
  MPI_Type_free(&part), MPI_Type_free(&whole);
  free(data);
}

/* One element of more bytes than an int counts, with a gap, so that it has to be packed. */
static void large_element(void) {
  const int part = (1 << 30) + 3;
  const size_t second = (size_t)part + 13, all = second + (size_t)part;
  MPI_Datatype type;
  MPI_Type_vector(2, part, part + 13, MPI_CHAR, &type);
  MPI_Type_commit(&type);
  char* data = calloc(all, 1);
  if (rank == 0) data[0] = 3, data[part - 1] = 4, data[part] = 5, data[second] = 6, data[all - 1] = 7;
  MPI_Bcast(data, 1, type, 0, MPI_COMM_WORLD);
  expect(data[0] == 3 && data[part - 1] == 4, "the first part of a large element", 0);
  expect(data[part] == (rank == 0 ? 5 : 0), "the gap of a large element", 0);
  expect(data[second] == 6 && data[all - 1] == 7, "the second part of a large element", 0);
  free(data);
  MPI_Type_free(&type);
}

static int handled, served;
static void count_errors(MPI_Comm* comm, int* code, ...) {
  (void)comm, (void)code;
  ++handled;
}

/* Wrong arguments give MPI's own error, once, by the communicator's own handler. */
static void mistakes(void) {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &n);
  int x[64] = {0}, y[64] = {0}, counts[8], displs[8], negative[8];
  for (int i = 0; i < 8; ++i) counts[i] = 1, displs[i] = i, negative[i] = -1;
  for (int call = 0; call < 12; ++call) MPI_Allreduce(x, y, 1, MPI_INT, MPI_SUM, comm); /* the shim takes over */
  MPI_Errhandler handler;
  MPI_Comm_create_errhandler(count_errors, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  int made = 0;
#define REFUSED(wanted, call)                              \
  do {                                                     \
    int class_of = MPI_SUCCESS;                            \
    MPI_Error_class(call, &class_of);                      \
    expect(class_of == (wanted), #call, class_of);         \
    expect(handled == ++made, "handled: " #call, handled); \
  } while (0)
  REFUSED(MPI_ERR_COUNT, MPI_Allreduce(x, y, -1, MPI_INT, MPI_SUM, comm));
  REFUSED(MPI_ERR_COUNT, MPI_Reduce(x, y, -1, MPI_INT, MPI_SUM, 0, comm));
  REFUSED(MPI_ERR_TYPE, MPI_Bcast(x, 1, MPI_DATATYPE_NULL, 0, comm));
  REFUSED(MPI_ERR_ARG, MPI_Bcast(MPI_IN_PLACE, 1, MPI_INT, 0, comm));
  REFUSED(MPI_ERR_ROOT, MPI_Bcast(x, 1, MPI_INT, 99, comm));
  REFUSED(MPI_ERR_TYPE, MPI_Allgather(x, 1, MPI_INT, y, 1, MPI_DATATYPE_NULL, comm));
  REFUSED(MPI_ERR_TYPE, MPI_Allgather(x, 1, MPI_DATATYPE_NULL, y, 1, MPI_INT, comm));
  REFUSED(MPI_ERR_COUNT, MPI_Allgather(x, -1, MPI_INT, y, 1, MPI_INT, comm));
  REFUSED(MPI_ERR_ARG, MPI_Allgather(x, 1, MPI_INT, MPI_IN_PLACE, 1, MPI_INT, comm));
  if (served) { /* MPI itself may take these */
    REFUSED(MPI_ERR_TRUNCATE, MPI_Allgather(x, 1, MPI_INT, y, 2, MPI_INT, comm));
    REFUSED(MPI_ERR_TRUNCATE, MPI_Alltoall(x, 2, MPI_INT, y, 1, MPI_INT, comm));
    REFUSED(MPI_ERR_BUFFER, MPI_Reduce(x, x, 2, MPI_INT, MPI_SUM, rank, comm));
  }
  REFUSED(MPI_ERR_TYPE, MPI_Alltoall(x, 1, MPI_INT, y, 1, MPI_DATATYPE_NULL, comm));
  REFUSED(MPI_ERR_COUNT, MPI_Alltoall(x, -1, MPI_INT, y, 1, MPI_INT, comm));
  REFUSED(MPI_ERR_COUNT, MPI_Alltoallv(x, negative, displs, MPI_INT, y, counts, displs, MPI_INT, comm));
  REFUSED(MPI_ERR_ARG, MPI_Alltoallv(x, NULL, displs, MPI_INT, y, counts, displs, MPI_INT, comm));
  REFUSED(MPI_ERR_ARG, MPI_Alltoallv(x, counts, displs, MPI_INT, y, counts, NULL, MPI_INT, comm));
  REFUSED(MPI_ERR_TYPE, MPI_Alltoallv(x, counts, displs, MPI_DATATYPE_NULL, y, counts, displs, MPI_INT, comm));
#undef REFUSED
  MPI_Errhandler_free(&handler);
  /* One buffer as both is wrong without MPI_IN_PLACE, but Open MPI gives the right result. */
  for (int i = 0; i < n; ++i) x[i] = rank + i;
  MPI_Reduce_scatter_block(x, x, 1, MPI_INT, MPI_SUM, comm);
  expect(x[0] == n * (n - 1) / 2 + n * rank, "Reduce_scatter_block of one buffer", x[0]);
  int one = 1, sum = 0;
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
  expect(sum == n, "Allreduce after mistakes", sum);
  MPI_Comm_free(&comm);
}

/* A rank with an open group of MoECCL's own interface, if that is loaded. MPI's calls are no part of it. */
static void in_a_group(void) {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &n);
  void* library = dlopen("libmoeccl.so.0", RTLD_NOW | RTLD_NOLOAD);
  int (*group_start)(void) = NULL;
  int (*group_end)(void) = NULL;
  if (library != NULL && rank == 0) {
    *(void**)&group_start = dlsym(library, "moecclGroupStart");
    *(void**)&group_end = dlsym(library, "moecclGroupEnd");
  }
  if (group_start != NULL) expect(group_start() == 0, "moecclGroupStart", 0);
  for (int call = 0; call < 12; ++call) { /* the shim takes over in between, or at the first */
    int one = call + 1, sum = 0, got = rank == n - 1 ? call : -1;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
    expect(sum == n * (call + 1), "Allreduce in a group", call);
    MPI_Bcast(&got, 1, MPI_INT, n - 1, comm);
    expect(got == call, "Bcast in a group", call);
  }
  int counts[64], at[64], in[64], out[64];
  for (int r = 0; r < n; ++r) counts[r] = 1, at[r] = r, in[r] = 100 * rank + r, out[r] = -1;
  MPI_Alltoallv(in, counts, at, MPI_INT, out, counts, at, MPI_INT, comm);
  for (int r = 0; r < n; ++r) expect(out[r] == 100 * r + rank, "Alltoallv in a group", r);
  if (group_end != NULL) expect(group_end() == 0, "moecclGroupEnd", 0);
  MPI_Comm_free(&comm);
}

/* MPI_Finalize calls this while it deletes the attributes of MPI_COMM_SELF. All of MPI still works then. */
static int at_the_end(MPI_Comm self, int key, void* value_of_it, void* extra) {
  (void)self, (void)key, (void)value_of_it, (void)extra;
  for (int call = 0; call < 12; ++call) {
    int one = 1, sum = 0;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(sum == n, "Allreduce in MPI_Finalize", call);
  }
  if (bad == 0) printf("rank %d of %d: all right\n", rank, n);
  return MPI_SUCCESS;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int at_the_end_key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_the_end, &at_the_end_key, NULL);
  MPI_Comm_set_attr(MPI_COMM_SELF, at_the_end_key, NULL);
  served = argc > 1 && strcmp(argv[1], "served") == 0;
  if (argc > 1 && !served) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    if (strcmp(argv[1], "element") == 0)
      large_element();
    else
      large();
    MPI_Finalize();
    return bad != 0;
  }
  everything(MPI_COMM_WORLD);
  MPI_Comm copy, part;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  everything(copy);
  MPI_Comm_split(copy, rank == 0 ? 0 : 1, -rank, &part);
  everything(part);
  MPI_Comm_free(&part);
  MPI_Comm_free(&copy);
  between_groups();
  handles_again();
  mistakes();
  in_a_group();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  MPI_Finalize(); /* says "all right" */
  return bad != 0;
}
