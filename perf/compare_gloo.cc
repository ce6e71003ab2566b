// SPDX-License-Identifier: Apache-2.0
// Compares MoECCL with Gloo over TCP on the loopback: perf/compare_gloo --procs 4
#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/job.h"
#include "perf/common/team.h"
#include "perf/versus/versus.h"

namespace {

class Gloo : public perf::Rival {
 public:
  Gloo(int rank, int n_ranks, const std::string& folder)
      : context_(std::make_shared<gloo::rendezvous::Context>(rank, n_ranks)) {
    gloo::rendezvous::FileStore store(folder);
    gloo::transport::tcp::attr loopback("localhost");
    auto device = gloo::transport::tcp::CreateDevice(loopback);
    context_->connectFullMesh(store, device);
  }

  const char* name() const override { return "Gloo"; }
  int rank() const override { return context_->rank; }
  int n_ranks() const override { return context_->size; }
  void barrier() override {
    gloo::BarrierOptions options(context_);
    gloo::barrier(options);
  }
  double max(double value) override {
    double most = 0;
    gloo::AllreduceOptions options(context_);
    options.setInput(&value, 1);
    options.setOutput(&most, 1);
    options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::max<double>));
    gloo::allreduce(options);
    return most;
  }

  // Announces buffers to Gloo once per size, as its own benchmark does.
  void prepare(const perf::Exchange& e) override {
    switch (e.op) {
      case perf::VersusOp::kAllReduce:
        return prepare_all_reduce(e);
      case perf::VersusOp::kReduceScatter:
        return prepare_reduce_scatter(e);
      case perf::VersusOp::kAllGather:
        return prepare_all_gather(e);
      case perf::VersusOp::kAllToAll:
        return prepare_all_to_all(e);
      case perf::VersusOp::kAllToAllv:
        return prepare_all_to_allv(e);
    }
  }
  void run() override { run_(); }

 private:
  void prepare_all_reduce(const perf::Exchange& e) {
    auto options = std::make_shared<gloo::AllreduceOptions>(context_);
    options->setInput(e.send, e.count);
    options->setOutput(e.recv, e.count);
    options->setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
    run_ = [options] { gloo::allreduce(*options); };
  }

  // Gloo reduces and scatters within one buffer, and leaves the result at its start.
  void prepare_reduce_scatter(const perf::Exchange& e) {
    reduced_.resize(e.n_send);
    const std::vector<int> counts(static_cast<size_t>(n_ranks()), static_cast<int>(e.count));
    auto algorithm = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
        context_, std::vector<float*>{reduced_.data()}, static_cast<int>(e.n_send), counts);
    // The first run is checked, with the caller's data; the timed ones need no copies.
    bool first = true;
    run_ = [this, algorithm, &e, first]() mutable {
      if (first) std::memcpy(reduced_.data(), e.send, e.n_send * sizeof(float));
      algorithm->run();
      if (!first) return;
      std::memcpy(e.recv, reduced_.data(), e.count * sizeof(float));
      std::fill(reduced_.begin(), reduced_.end(), 0.0f);
      first = false;
    };
  }

  void prepare_all_gather(const perf::Exchange& e) {
    auto options = std::make_shared<gloo::AllgatherOptions>(context_);
    options->setInput(e.send, e.n_send);
    options->setOutput(e.recv, e.n_recv);
    run_ = [options] { gloo::allgather(*options); };
  }

  void prepare_all_to_all(const perf::Exchange& e) {
    auto options = std::make_shared<gloo::AlltoallOptions>(context_);
    options->setInput(e.send, e.n_send);
    options->setOutput(e.recv, e.n_recv);
    run_ = [options] { gloo::alltoall(*options); };
  }

  void prepare_all_to_allv(const perf::Exchange& e) {
    auto options = std::make_shared<gloo::AlltoallvOptions>(context_);
    options->setInput(e.send, std::vector<int64_t>(e.send_counts.begin(), e.send_counts.end()));
    options->setOutput(e.recv, std::vector<int64_t>(e.recv_counts.begin(), e.recv_counts.end()));
    run_ = [options] { gloo::alltoallv(*options); };
  }

  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::function<void()> run_;
  std::vector<float> reduced_;
};

// Runs before the ranks are forked, so that all use the same folder.
std::string make_folder() {
  std::string folder = (std::filesystem::temp_directory_path() / "compare_gloo.XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) perf::fail("cannot make " + folder + ": " + std::strerror(errno));
  return folder;
}

int compare(const perf::VersusOptions& options) {
  const std::string folder = make_folder();
  perf::JobOptions settings;
  settings.procs = options.procs > 0 ? options.procs : 4;
  perf::Job job(settings);
  int status = 0;
  job.run(false, [&](int, const perf::Team& team) {
    Gloo rival(job.first_rank(), job.n_ranks(), folder);
    rival.barrier();
    if (job.leads()) std::filesystem::remove_all(folder);
    status = perf::report_versus(options, rival, perf::run_versus(options, rival, team.comm(0)));
    rival.barrier();  // Gloo reports a peer that leaves early
  });
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const perf::VersusOptions options = perf::parse_versus_options(argc, argv, "compare_gloo", true);
  try {
    return compare(options);
  } catch (const std::exception& error) {
    perf::fail(std::string("Gloo: ") + error.what());
  }
}
