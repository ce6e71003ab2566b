// SPDX-License-Identifier: Apache-2.0
// A C++ program of what MPI allows around the collectives that the shim serves: an argument names one of `kWhat`.
// Prints "rank R of N: all right" or what was wrong.
#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

int rank, n, bad;

void expect(bool good, const std::string& what, int where = 0) {
  if (good || bad++ > 5) return;
  std::fprintf(stderr, "rank %d: %s is wrong at %d\n", rank, what.c_str(), where);
}

// The shim takes the communicator over in between.
void warm_up(MPI_Comm comm) {
  for (int call = 0; call < 12; ++call) {
    int one = 1, sum = 0;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, comm);
    expect(sum == n, "Allreduce", call);
  }
}

// Rank 0 reaches the collective only after rank 1, which waits in it, has done its part of something else.
void meet(const char* what, const std::function<void()>& on_0, const std::function<void()>& on_1,
          const std::function<void()>& ends_on_1) {
  int value = rank == 0 ? 42 : -1;
  if (rank == 0) on_0();
  if (rank == 1) on_1();
  MPI_Bcast(&value, 1, MPI_INT, 0, MPI_COMM_WORLD);
  expect(value == 42, what);
  if (rank == 1) ends_on_1();
}

void progress() {
  warm_up(MPI_COMM_WORLD);
  constexpr int kInts = 1 << 18;  // above every eager limit
  std::vector<int> data(kInts, rank == 0 ? 7 : 0);
  MPI_Request request = MPI_REQUEST_NULL;
  const auto wait = [&] { MPI_Wait(&request, MPI_STATUS_IGNORE); };
  for (const int count : {kInts, 2}) {
    data.assign(kInts, rank == 0 ? 7 : 0);
    meet(
        "a message to a posted receive", [&] { MPI_Ssend(data.data(), count, MPI_INT, 1, 1, MPI_COMM_WORLD); },
        [&] { MPI_Irecv(data.data(), count, MPI_INT, 0, 1, MPI_COMM_WORLD, &request); }, wait);
    if (rank <= 1) expect(data[static_cast<size_t>(count) - 1] == 7, "the message", count);
  }
  meet(
      "an ordinary send", [&] { MPI_Send(data.data(), kInts, MPI_INT, 1, 1, MPI_COMM_WORLD); },
      [&] { MPI_Irecv(data.data(), kInts, MPI_INT, 0, 1, MPI_COMM_WORLD, &request); }, wait);
  MPI_Datatype third;
  MPI_Type_vector(kInts / 4, 1, 3, MPI_INT, &third);
  MPI_Type_commit(&third);
  std::vector<int> spread(kInts, rank);
  const auto receive = [&] { MPI_Recv(data.data(), kInts / 4, MPI_INT, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE); };
  meet(
      "a send of a vector", receive, [&] { MPI_Isend(spread.data(), 1, third, 0, 2, MPI_COMM_WORLD, &request); }, wait);
  if (rank == 0) expect(data[kInts / 4 - 1] == 1, "the vector");
  MPI_Type_free(&third);
  std::vector<char> room(sizeof(int) * kInts + MPI_BSEND_OVERHEAD);
  meet(
      "a buffered send", receive,
      [&] {
        MPI_Buffer_attach(room.data(), static_cast<int>(room.size()));
        MPI_Bsend(spread.data(), kInts / 4, MPI_INT, 0, 2, MPI_COMM_WORLD);
      },
      [&] {
        void* gone = nullptr;
        int bytes = 0;
        MPI_Buffer_detach(&gone, &bytes);
      });
  const auto begin = [&] { MPI_Ibarrier(MPI_COMM_WORLD, &request); };
  if (rank > 1) begin();
  meet(
      "a barrier", [&] { begin(), wait(); }, begin, wait);
  if (rank > 1) wait();
  MPI_Win window;
  MPI_Win_create(data.data(), sizeof(int) * kInts, sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &window);
  data.assign(kInts, 1);
  MPI_Barrier(MPI_COMM_WORLD);
  meet(
      "a window",
      [&] {
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 1, 0, window);
        MPI_Accumulate(spread.data(), kInts, MPI_INT, 1, 0, kInts, MPI_INT, MPI_SUM, window);
        MPI_Win_unlock(1, window);
      },
      [] {}, [] {});
  MPI_Win_free(&window);
}

using Fortran = void (*)(const void*, void*, const MPI_Fint*, const MPI_Fint*, const MPI_Fint*, const MPI_Fint*,
                         MPI_Fint*);
using FortranBcast = void (*)(void*, const MPI_Fint*, const MPI_Fint*, const MPI_Fint*, const MPI_Fint*, MPI_Fint*);

void none_here() { std::printf("none here\n"); }

// Ranks of one job that are written in C and in Fortran, where this MPI has it.
void fortran() {
#ifdef OPEN_MPI
  constexpr const char* kNames[] = {"libmpi_mpifh.so.40"};
#else
  constexpr const char* kNames[] = {"libmpifort.so.12", "libmpichfort.so.12"};  // MPICH's, and Debian's MPICH's
#endif
  void* library = nullptr;
  for (const char* name : kNames)
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
  const auto all_reduce = library == nullptr ? nullptr : reinterpret_cast<Fortran>(dlsym(library, "mpi_allreduce_"));
  const auto bcast = library == nullptr ? nullptr : reinterpret_cast<FortranBcast>(dlsym(library, "mpi_bcast_"));
  if (all_reduce == nullptr || bcast == nullptr) return none_here();
  // MPICH's place of it is known to its Fortran initialisation alone.
  const void* const in_place = dlsym(RTLD_DEFAULT, "mpi_fortran_in_place_");
  for (int call = 0; call < 20; ++call) {
    int value = rank == n - 1 ? call : -1;
    double sum = rank + 1, in = rank + 1;
    const bool give_in_place = in_place != nullptr && call % 2 == 1;
    if (rank % 2 == 0) {
      MPI_Allreduce(give_in_place ? MPI_IN_PLACE : &in, &sum, 1, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD);
      MPI_Bcast(&value, 1, MPI_INTEGER, n - 1, MPI_COMM_WORLD);
    } else {
      const MPI_Fint one = 1, root = n - 1, comm = MPI_Comm_c2f(MPI_COMM_WORLD), op = MPI_Op_c2f(MPI_SUM);
      const MPI_Fint type = MPI_Type_c2f(MPI_DOUBLE_PRECISION), integer = MPI_Type_c2f(MPI_INTEGER);
      MPI_Fint failed = 0;
      all_reduce(give_in_place ? in_place : &in, &sum, &one, &type, &op, &comm, &failed);
      expect(failed == 0, "mpi_allreduce_'s result", failed);
      bcast(&value, &one, &integer, &root, &comm, &failed);
      expect(failed == 0, "mpi_bcast_'s result", failed);
    }
    expect(sum == n * (n + 1) / 2.0, "Allreduce of two languages", call);
    expect(value == call, "Bcast of two languages", value);
  }
}

void types() {
  warm_up(MPI_COMM_WORLD);
  for (int round = 0; round < 3; ++round) {
    MPI_Datatype real, three;
    MPI_Type_create_f90_real(6, 37, &real);
    MPI_Type_contiguous(3, real, &three);
    MPI_Type_commit(&three);
    float values[3] = {0, 0, 0};
    if (rank == 0) values[0] = 1, values[1] = 2, values[2] = 3;
    MPI_Bcast(values, 1, three, 0, MPI_COMM_WORLD);
    expect(values[0] == 1 && values[1] == 2 && values[2] == 3, "Bcast of Fortran's selected reals", round);
    MPI_Type_free(&three);
    int size = 0;
    MPI_Type_size(real, &size);
    expect(size == 4, "a selected real after the call", size);
  }
}

// Ranks of one call that give its counts in integers of two kinds, where MPI has these.
void counts() {
#if MPI_VERSION >= 4
  std::vector<int> in(static_cast<size_t>(n), rank), out(static_cast<size_t>(n)), at, ones(static_cast<size_t>(n), 1);
  const std::vector<MPI_Count> large_ones(ones.begin(), ones.end());
  std::vector<MPI_Aint> large_at;
  for (int r = 0; r < n; ++r) at.push_back(r), large_at.push_back(r);
  MPI_Datatype two;
  MPI_Type_contiguous_c(2, MPI_INT, &two);
  MPI_Type_commit(&two);
  for (int call = 0; call < 20; ++call) {
    int one = 1, sum = 0, pair[2] = {rank == 0 ? call : -1, rank == 0 ? call : -1};
    if (rank % 2 == 0) {
      MPI_Allreduce_c(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
      MPI_Bcast_c(pair, 1, two, 0, MPI_COMM_WORLD);
      MPI_Alltoallv_c(in.data(), large_ones.data(), large_at.data(), MPI_INT, out.data(), large_ones.data(),
                      large_at.data(), MPI_INT, MPI_COMM_WORLD);
    } else {
      MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
      MPI_Bcast(pair, 2, MPI_INT, 0, MPI_COMM_WORLD);
      MPI_Alltoallv(in.data(), ones.data(), at.data(), MPI_INT, out.data(), ones.data(), at.data(), MPI_INT,
                    MPI_COMM_WORLD);
    }
    expect(sum == n && pair[0] == call && pair[1] == call, "a call with counts of two kinds", call);
    for (int r = 0; r < n; ++r) expect(out[static_cast<size_t>(r)] == r, "Alltoallv with counts of two kinds", r);
  }
  MPI_Type_free(&two);
#else
  none_here();
#endif
}

void throw_it(MPI_Comm*, int*, ...) { throw std::runtime_error("the program's own"); }

void throws() {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Errhandler handler;
  MPI_Comm_create_errhandler(throw_it, &handler);
  MPI_Comm_set_errhandler(comm, handler);
  for (int round = 0; round < 2; ++round) {  // before and after the communicator is taken over
    bool caught = false;
    try {
      int x[2] = {0, 0};
      MPI_Allreduce(x, x + 1, -1, MPI_INT, MPI_SUM, comm);
    } catch (const std::runtime_error& e) {
      caught = std::strcmp(e.what(), "the program's own") == 0;
    }
    expect(caught, "the handler's exception", round);
    warm_up(comm);
  }
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
}

// The last rank has too little room, which only that rank's call reports. All ranks count the call.
void truncates() {
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int x[2] = {1, 2}, kind = MPI_SUCCESS;
  MPI_Error_class(MPI_Bcast(x, rank == n - 1 ? 1 : 2, MPI_INT, 0, MPI_COMM_WORLD), &kind);
  if (rank == n - 1) expect(kind == MPI_ERR_TRUNCATE, "Bcast to too little room", kind);
#ifdef OPEN_MPI
  if (rank == 0) {  // refused here before it begins
    std::vector<int> out(static_cast<size_t>(2 * n));
    MPI_Error_class(MPI_Alltoall(out.data(), 2, MPI_INT, out.data() + n, 1, MPI_INT, MPI_COMM_WORLD), &kind);
    expect(kind == MPI_ERR_TRUNCATE, "Alltoall of blocks of two sizes", kind);
  }
#endif
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL);
  warm_up(MPI_COMM_WORLD);
}

MPI_Comm other = MPI_COMM_NULL;
bool handled;
void add_on_other(MPI_Comm*, int*, ...) {
  int one = 1, sum = 0;
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, other);
  expect(sum == n, "Allreduce in an error handler", sum);
  handled = true;
}

// An error handler of rank 0 makes the call that the other ranks make by themselves.
void handler() {
  MPI_Comm_dup(MPI_COMM_WORLD, &other);
  warm_up(other);
  MPI_Errhandler adds;
  MPI_Comm_create_errhandler(add_on_other, &adds);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, adds);
  int x[2] = {0, 0};
  if (rank == 0) MPI_Allreduce(x, x, 2, MPI_INT, MPI_SUM, MPI_COMM_WORLD);  // an error, which each MPI checks
  if (rank != 0) add_on_other(nullptr, nullptr);
  expect(handled, "the handler's call");
  MPI_Errhandler_free(&adds);
  MPI_Comm_free(&other);
}

// Threads that make their communicators, and call on them, at the same time. The shim may make none of its own.
void threads() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) return none_here();
  MPI_Comm comms[2];
  for (MPI_Comm& comm : comms) MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  const auto run = [](MPI_Comm comm) {
    for (int round = 0; round < 4; ++round) {
      MPI_Comm again;
      warm_up(comm);
      MPI_Comm_dup(comm, &again);
      warm_up(again);
      MPI_Comm_free(&again);
    }
  };
  std::thread beside(run, comms[0]);
  run(comms[1]);
  beside.join();
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
}

// A thread of rank 0 makes calls. It is cancelled in the one in which the shim takes the communicator over, where it
// waits for rank 1. That call ends, and this rank's other thread makes the rest.
struct {
  std::atomic<int> n_made{0};
  static void* run(void* made) {
    for (int call = 0; call < 12; ++call) {
      int one = 1, sum = 0;
      MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
      expect(sum == n, "Allreduce of a thread", call);
      ++*static_cast<std::atomic<int>*>(made);
      pthread_testcancel();
    }
    return nullptr;
  }
} caller;

void cancelled() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_MULTIPLE) return none_here();
  if (rank != 0) return warm_up(MPI_COMM_WORLD);
  pthread_t thread;
  expect(pthread_create(&thread, nullptr, caller.run, &caller.n_made) == 0, "a thread");
  for (int last = -1; last != caller.n_made; usleep(300'000)) last = caller.n_made;
  pthread_cancel(thread);
  void* result = nullptr;
  pthread_join(thread, &result);
  expect(result == PTHREAD_CANCELED && caller.n_made < 12, "the cancellation", caller.n_made);
  for (int call = caller.n_made; call < 12; ++call) {
    int one = 1, sum = 0;
    MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    expect(sum == n, "Allreduce", call);
  }
}

// More communicators than the shim takes over at a time. Their calls are right with and without it.
void many() {
  std::vector<MPI_Comm> comms(20);
  for (MPI_Comm& comm : comms) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    warm_up(comm);
  }
  for (MPI_Comm comm : comms) warm_up(comm);
  for (MPI_Comm& comm : comms) MPI_Comm_free(&comm);
  MPI_Comm_dup(MPI_COMM_WORLD, &comms[0]);
  for (int i = 0; i < 128; ++i) warm_up(comms[0]);  // there is room again
  MPI_Comm_free(&comms[0]);
}

// The first of these communicators is taken over. It has earned too little when it is freed, so the others stay MPI's,
// until one makes twice as many calls as a first one needs.
void brief() {
  for (int i = 0; i < 12; ++i) {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    for (int times = i < 11 ? 1 : 2; times > 0; --times) warm_up(comm);
    MPI_Comm_free(&comm);
  }
}

int finish(MPI_Comm, int, void*, void*) {
  for (MPI_Comm comm : {other, MPI_COMM_WORLD}) warm_up(comm);
  return MPI_SUCCESS;
}

// A rank makes its last calls within MPI_Finalize, as HDF5 does for files that are still open, and the others before
// it.
void last() {
  MPI_Comm_dup(MPI_COMM_WORLD, &other);
  for (MPI_Comm comm : {other, MPI_COMM_WORLD}) warm_up(comm);
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, finish, &key, nullptr);
  if (rank == 0)
    MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  else
    finish(MPI_COMM_SELF, key, nullptr, nullptr);
}

void end() {
  if (bad == 0) std::printf("rank %d of %d: all right\n", rank, n);
  MPI_Finalize();
}

// Called by exit(), after the shim's own objects were destroyed if they are that kind.
void end_late() {
  warm_up(MPI_COMM_WORLD);
  const auto size = static_cast<size_t>(n);
  std::vector<int> in(size, rank), out(size), ones(size, 1), at;
  for (int r = 0; r < n; ++r) at.push_back(r);
  MPI_Alltoallv(in.data(), ones.data(), at.data(), MPI_INT, out.data(), ones.data(), at.data(), MPI_INT,
                MPI_COMM_WORLD);
  for (int r = 0; r < n; ++r) expect(out[static_cast<size_t>(r)] == r, "Alltoallv at exit", r);
  end();
  std::fflush(stdout);
  if (bad != 0) std::_Exit(1);
}

void plain() { warm_up(MPI_COMM_WORLD); }

struct {
  const char* name;
  void (*run)();
} const kWhat[] = {{"progress", progress}, {"fortran", fortran},    {"counts", counts},   {"types", types},
                   {"throws", throws},     {"plain", plain},        {"handler", handler}, {"truncates", truncates},
                   {"threads", threads},   {"many", many},          {"last", last},       {"late", plain},
                   {"brief", brief},       {"cancelled", cancelled}};

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  int threads = 0;
  const bool several = what == "threads" || what == "last" || what == "cancelled";
  MPI_Init_thread(&argc, &argv, several ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  if (what == "late") std::atexit(end_late);
  for (const auto& w : kWhat) {
    if (what == w.name) w.run();
  }
  if (what != "late") end();
  return bad != 0;
}
