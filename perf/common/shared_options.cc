// SPDX-License-Identifier: Apache-2.0
#include "perf/common/shared_options.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "perf/common/fail.h"
#include "perf/common/output.h"
#include "perf/common/text.h"

namespace perf {
namespace {

std::terminate_handler usual = nullptr;

// Handles an exception of any thread that is not caught.
[[noreturn]] void say_out_of_memory() {
  const char* const sentence = "there is not enough memory for a run of these sizes: give smaller ones";
  try {
    if (const std::exception_ptr cause = std::current_exception()) std::rethrow_exception(cause);
  } catch (const std::bad_alloc&) {
    fail(sentence);
  } catch (const std::length_error&) {
    fail(sentence);
  } catch (...) {
  }
  usual();
  std::abort();
}

std::string why_not_writable(const std::string& path) {
  if (path.empty() || !leads_launch()) return "";
  const bool there = access(path.c_str(), F_OK) == 0;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return "cannot write " + path + ": " + std::strerror(errno);
  close(file);
  if (!there) unlink(path.c_str());
  return "";
}

}  // namespace

void add_output(App& app, const std::string& names, std::string& path, const std::string& help) {
  app.add_option(names, path, help)->check(why_not_writable);
}

void add_size(App& app, const std::string& names, size_t& bytes, const std::string& help) {
  app.add_option_function<std::string>(
         names, [&bytes](const std::string& text) { bytes = static_cast<size_t>(parse_size(text)); }, help)
      ->check([](const std::string& text) {
        return parse_size(text) < 0 ? "\"" + text + "\" is not a size: give bytes, or a number with K, M or G" : "";
      });
}

void check_sizes(size_t least, size_t most) {
  if (least > most)
    fail("-b is " + std::to_string(least) + " and -e is " + std::to_string(most) + ": give sizes with -b at most -e");
}

void add_job_options(App& app, JobOptions& job, Memories memories) {
  app.add_option("--ranks", job.threads, "ranks as threads of this process")->check(whole_number(1));
  app.add_option("--procs", job.procs, "fork this many processes (default: as the launcher says, or one)")
      ->check(whole_number(1, kMostProcs));
  app.add_option("-T,--timeout", job.timeout_s, "seconds after which a test fails")
      ->check(whole_number(0, INT32_MAX / 1000));  // the library counts milliseconds
  app.add_option("--topology", job.topology, "synthetic topology, such as 'node:2(bw=1GB/s,lat=20us) gpu:4'");
  app.add_flag("--pace", job.pace, "slow links to the topology's figures: results are EMULATED");
  app.add_flag("--deterministic", job.deterministic, "fixed-order reductions");
  if (memories == Memories::kNone) return;
  Named<Memory> named = {{"heap", Memory::kHeap}, {"malloc", Memory::kMalloc}};
  if (memories == Memories::kAll) named.emplace_back("cuda", Memory::kCuda);
  const std::string usual = job.memory == Memory::kMalloc ? "malloc; heap" : "heap, which";
  add_one_of<Memory>(&app, "--mem", job.memory, named, "where buffers live (default: " + usual + " is moecclMemAlloc)");
}

void parse_or_exit(App& app, int argc, char** argv) {
  check_output_at_exit();
  if (std::get_terminate() != say_out_of_memory) usual = std::set_terminate(say_out_of_memory);
  app.parse(argc, argv, 1);
}

}  // namespace perf
