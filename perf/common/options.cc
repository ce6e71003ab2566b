// SPDX-License-Identifier: Apache-2.0
#include "perf/common/options.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "perf/common/fail.h"
#include "perf/common/gpu.h"
#include "perf/common/shared_options.h"

namespace perf {
namespace {

// Options that steer a GPU. They are accepted so that nccl-tests command lines keep working.
struct Ignored {
  int stream_null = 0, cta_policy = -1, device_implementation = 0, device_ctas = 16;
};

void add_sizes(App& app, Options& o) {
  add_size(app, "-b,--minbytes", o.min_bytes, "smallest size (32M); K, M, G are binary");
  add_size(app, "-e,--maxbytes", o.max_bytes, "largest size (32M)");
  add_size(app, "-i,--stepbytes", o.step_bytes, "added from size to size (1M)");
  app.add_option("-f,--stepfactor", o.step_factor, "or: multiplied from size to size (default: off)")
      ->check(whole_number(0));
}

void add_operation(App& app, Options& o) {
  app.add_option_function<std::string>(
         "-o,--op", [&o](const std::string& name) { o.ops = parse_red_ops(name); },
         "sum (default)/prod/min/max/avg/mulsum/all")
      ->check([](const std::string& name) {
        return parse_red_ops(name).empty() ? "\"" + name + "\" is not one of sum, prod, min, max, avg, mulsum, all"
                                           : "";
      });
  app.add_option_function<std::string>(
         "-d,--datatype", [&o](const std::string& name) { o.types = parse_data_types(name); },
         nccl_type_names() + "/all (float)")
      ->check([](const std::string& name) {
        return parse_data_types(name).empty() ? "\"" + name + "\" is not one of " + nccl_type_names() + "/all" : "";
      });
  app.add_option_function<std::string>(
         "-r,--root", [&o](const std::string& text) { o.root = text == "all" ? -1 : std::atoi(text.c_str()); },
         "root rank (0), or all (-1)")
      ->check([](const std::string& text) { return text == "all" ? "" : whole_number(-1)(text); });
}

void add_measurement(App& app, Options& o) {
  app.add_option("-n,--iters", o.iters, "timed iterations")->check(whole_number(1))->capture_default_str();
  app.add_option("-w,--warmup_iters", o.warmup_iters, "iterations before timing")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_option("-m,--agg_iters", o.agg_iters, "operations grouped in one iteration")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("-N,--run_cycles", o.run_cycles, "times to run all sizes; 0: for ever")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_option("-c,--check", o.check, "check iterations, every element")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_option("-z,--blocking", o.blocking, "1: wait and barrier after each operation, 2: wait, 3: barrier untimed")
      ->check(range(0, 3))
      ->capture_default_str();
  app.add_option_function<int>(
         "-a,--average", [&o](const int& how) { o.average = static_cast<Average>(how); },
         "time over ranks: 0 rank 0, 1 average (default), 2 min, 3 max")
      ->check(range(0, 3));
  app.add_option("-C,--report_cputime,--cputime", o.cpu_time, "report the time that the calls take to return");
  app.add_option("-S,--report_timestamps,--timestamps", o.timestamps, "append the time of day to each line");
  app.add_option("-M,--memory", o.memory_report, "report the communicator's memory");
  app.add_option("-u,--unalign", o.unalign, "index of the first element")
      ->check(whole_number(0))
      ->capture_default_str();
  app.add_option("-R,--local_register", o.local_register, "1: register buffers, 2: buffers from moecclMemAlloc")
      ->check(range(0, 2))
      ->capture_default_str();
  app.add_option("-I,--per_iter_timing", o.per_iter_timing, "print min, max, p99 of iterations (slowest rank)");
  app.add_option("-G,--cudagraph", o.cuda_graph,
                 "on CUDA memory: capture the iterations in a graph and replay it this many times")
      ->check(whole_number(0));
  app.add_option("-K,--per_iter_skip", o.per_iter_skip, "leading iterations that -I leaves out")->capture_default_str();
  add_output(app, "-J,--output_file", o.output_file, "write results as JSON (nccl-tests' version 3)");
}

void add_ours(App& app, Options& o, bool takes_matrix) {
  app.add_option("--stream", o.on_stream, "1: issue to a stream and wait at the end (default: calls block)");
  app.add_flag("--median", o.report_median, "the time column is the median iteration of the slowest rank");
  app.add_option("--plan", o.plan, "force an algorithm (moecclPlanForce)");
  app.add_flag("--explain", o.explain, "print the plan of each size");
  add_output(app, "--plot", o.plot_file, "draw time and bus bandwidth over size (SVG)");
  if (takes_matrix)
    app.add_option("--matrix", o.matrix_file, "square matrix of bytes from rank i (row) to rank j (column)")
        ->envname("NCCL_TESTS_ALLTOALLV_MATRIX_FILE");
}

void add_ranks(App& app, Options& o) {
  add_job_options(app, o.job, Memories::kAll);
  Option* const memory = app.get_option("--mem");
  memory->description(memory->get_description() + "; with -g and a GPU: cuda");
  Option* const ranks = app.get_option("--ranks");
  ranks->description("the same as -t: threads of this process, each with the ranks of -g");
  app.add_option("-t,--nthreads", o.job.threads, "threads per process, each with the ranks of -g")
      ->check(whole_number(1))
      ->capture_default_str()
      ->excludes(ranks);
  app.add_option("-g,--ngpus", o.job.per_thread, "ranks per thread, driven as a group")
      ->check(whole_number(1))
      ->capture_default_str();
  app.add_option("-p,--parallel_init", o.job.parallel_init, "threads join their ranks themselves");
}

void add_ignored(App& app, Ignored& ignored) {
  app.add_option("-y,--stream_null", ignored.stream_null, "no effect: for GPU streams");
  app.add_option("-x,--cta_policy", ignored.cta_policy, "no effect: for GPU kernels");
  app.add_option("-D,--device_implementation", ignored.device_implementation, "no effect: for GPU kernels");
  app.add_option("-V,--device_cta_count", ignored.device_ctas, "no effect: for GPU kernels");
}

std::vector<std::string> notes_for(const App& app) {
  std::vector<std::string> notes;
  for (const char* name : {"--stream_null", "--cta_policy", "--device_implementation", "--device_cta_count"})
    if (app.count(name) > 0) notes.push_back(std::string(name) + " has no effect on the host backend");
  if (std::getenv("NCCL_TESTS_DEVICE") != nullptr)
    notes.push_back("NCCL_TESTS_DEVICE has no effect: ranks take the devices of CUDA_VISIBLE_DEVICES in turn");
  return notes;
}

// Refuses or corrects the same values after parsing as nccl-tests.
void reconcile(Options& o) {
  if (o.min_bytes > o.max_bytes) {
    std::fprintf(stderr, "invalid sizes for 'minbytes' and 'maxbytes': %zu > %zu\n", o.min_bytes, o.max_bytes);
    std::exit(1);
  }
  if (o.step_factor <= 1 && o.step_bytes == 0 && o.min_bytes < o.max_bytes) {
    std::fprintf(stderr, "invalid step: give -i above 0 or -f above 1\n");
    std::exit(1);
  }
  if (o.per_iter_skip < 0 || o.per_iter_skip >= o.iters) {
    std::fprintf(stderr, "per-iteration skip (-K) must be between 0 and %d. Disabling.\n", o.iters - 1);
    o.per_iter_skip = 0;
  }
  if (o.cuda_graph > 0 && !o.job.on_cuda()) {
    o.notes.push_back("--cudagraph has no effect on the host backend");
    o.cuda_graph = 0;
  }
  if (o.cuda_graph > 0 && o.samples()) {
    o.notes.push_back(
        "with --cudagraph no iteration is timed by itself: --per_iter_timing and --median have no effect");
    o.per_iter_timing = o.report_median = false;
  }
  if (o.local_register == 2 && !o.job.on_cuda()) o.job.memory = Memory::kHeap;
}

}  // namespace

Options parse_options(int argc, char** argv, const char* program, bool takes_matrix) {
  Options o;
  Ignored ignored;
  App app("nccl-tests-compatible performance and correctness test on MoECCL", program);
  add_sizes(app, o);
  add_operation(app, o);
  add_measurement(app, o);
  add_ours(app, o, takes_matrix);
  add_ranks(app, o);
  add_ignored(app, ignored);
  parse_or_exit(app, argc, argv);
  o.notes = notes_for(app);
  o.job.grouping = grouping_of_environment();
  if (o.job.grouping.op != 0 && !o.job.topology.empty() && !o.job.pace)
    fail(
        "NCCL_TESTS_SPLIT and --topology: groups keep a topology only where it is paced: add --pace, or leave one out");
  // As users of nccl-tests expect, -g means GPUs where there are any.
  if (app.count("--mem") == 0 && app.count("--ngpus") > 0 && gpu::likely()) o.job.memory = Memory::kCuda;
  reconcile(o);
  check_ranks(o.job, std::max(1, o.job.procs));
  o.job.grouping.ranks_per_process = o.job.threads * o.job.per_thread;
  return o;
}

}  // namespace perf
