// SPDX-License-Identifier: Apache-2.0
// Compares MoECCL with MPI: mpirun -n 4 --oversubscribe perf/compare_mpi
// Uses only the C interface: the C++ one, removed in MPI-3, does not compile without warnings.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <malloc.h>
#include <mpi.h>

#include <cstdlib>
#include <limits>
#include <string>
#include <thread>

#include "perf/common/fail.h"
#include "perf/versus/versus.h"

namespace {

void mpi(int result, const char* call) {
  if (result != MPI_SUCCESS) perf::fail(std::string(call) + ": MPI error " + std::to_string(result));
}

class Mpi : public perf::Rival {
 public:
  explicit Mpi(bool tuned) {
    mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    mpi(MPI_Comm_size(MPI_COMM_WORLD, &n_ranks_), "MPI_Comm_size");
    char version[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    mpi(MPI_Get_library_version(version, &length), "MPI_Get_library_version");
    // "Open MPI v4.1.4, package: ..." -> "Open MPI v4.1.4"
    name_ = std::string(version).substr(0, std::string(version).find_first_of(",\n"));
    if (tuned) name_ += " tuned";
  }

  const char* name() const override { return name_.c_str(); }
  int rank() const override { return rank_; }
  int n_ranks() const override { return n_ranks_; }
  void barrier() override { mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }
  double max(double value) override {
    double most = 0;
    mpi(MPI_Allreduce(&value, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    return most;
  }

  void prepare(const perf::Exchange& e) override {
    exchange_ = &e;
    count_ = narrow(e.count);
    send_counts_ = narrow(e.send_counts);
    send_displs_ = narrow(e.send_displs);
    recv_counts_ = narrow(e.recv_counts);
    recv_displs_ = narrow(e.recv_displs);
  }

  void run() override {
    const perf::Exchange& e = *exchange_;
    switch (e.op) {
      case perf::VersusOp::kAllReduce:
        return mpi(MPI_Allreduce(e.send, e.recv, count_, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD), "MPI_Allreduce");
      case perf::VersusOp::kReduceScatter:
        return mpi(MPI_Reduce_scatter_block(e.send, e.recv, count_, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD),
                   "MPI_Reduce_scatter_block");
      case perf::VersusOp::kAllGather:
        return mpi(MPI_Allgather(e.send, count_, MPI_FLOAT, e.recv, count_, MPI_FLOAT, MPI_COMM_WORLD),
                   "MPI_Allgather");
      case perf::VersusOp::kAllToAll:
        return mpi(MPI_Alltoall(e.send, count_, MPI_FLOAT, e.recv, count_, MPI_FLOAT, MPI_COMM_WORLD), "MPI_Alltoall");
      case perf::VersusOp::kAllToAllv:
        return mpi(MPI_Alltoallv(e.send, send_counts_.data(), send_displs_.data(), MPI_FLOAT, e.recv,
                                 recv_counts_.data(), recv_displs_.data(), MPI_FLOAT, MPI_COMM_WORLD),
                   "MPI_Alltoallv");
    }
  }

 private:
  static int narrow(size_t count) {
    if (count > static_cast<size_t>(std::numeric_limits<int>::max()))
      perf::fail("MPI counts are ints: choose a smaller -e");
    return static_cast<int>(count);
  }
  static std::vector<int> narrow(const std::vector<size_t>& counts) {
    std::vector<int> out;
    for (const size_t count : counts) out.push_back(narrow(count));
    return out;
  }

  std::string name_;
  int rank_ = 0, n_ranks_ = 1, count_ = 0;
  const perf::Exchange* exchange_ = nullptr;
  std::vector<int> send_counts_, send_displs_, recv_counts_, recv_displs_;
};

moecclComm_t connect(const Mpi& rival) {
  moecclUniqueId id = {};
  if (rival.rank() == 0) perf::check(moecclGetUniqueId(&id), "moecclGetUniqueId", 0);
  mpi(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
  moecclComm_t comm = nullptr;
  perf::check(moecclCommInitRank(&comm, rival.n_ranks(), id, rival.rank()), "moecclCommInitRank", rival.rank());
  return comm;
}

// Tunes Open MPI for shared memory as its experts do: the collectives of component sm with large fragments, eager
// messages up to 32 KiB, waiting ranks that yield a core that they share, and memory that malloc keeps. Variables that
// are already set stay as they are.
void tune() {
  setenv("OMPI_MCA_coll_sm_priority", "100", 0);
  setenv("OMPI_MCA_coll_sm_fragment_size", "131072", 0);
  setenv("OMPI_MCA_btl_vader_eager_limit", "32768", 0);
  const char* const n_ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (n_ranks != nullptr && std::strtoul(n_ranks, nullptr, 10) > std::thread::hardware_concurrency())
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

}  // namespace

int main(int argc, char** argv) {
  const perf::VersusOptions options = perf::parse_versus_options(argc, argv, "compare_mpi", false);
  if (options.tuned) tune();
  mpi(MPI_Init(&argc, &argv), "MPI_Init");
  Mpi rival(options.tuned);
  const moecclComm_t comm = connect(rival);
  const std::vector<perf::VersusPoint> points = perf::run_versus(options, rival, comm);
  const int status = perf::report_versus(options, rival, points);
  perf::check(moecclCommDestroy(comm), "moecclCommDestroy", rival.rank());
  mpi(MPI_Finalize(), "MPI_Finalize");
  return status;
}
