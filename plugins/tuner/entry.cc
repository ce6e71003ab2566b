// SPDX-License-Identifier: Apache-2.0
// What NCCL loads: the structures ncclTunerPlugin_v3 to _v7. No function returns an error or lets an exception escape,
// because NCCL passes a tuner's error on to the program. Where this tuner cannot help, NCCL's own choice stays.
#include <exception>

#include "plugins/tuner/tuner.h"

namespace moeccl::tuner {
namespace {

constexpr const char* kName = "MoECCL";

int make(const Tuner::Setup& setup, void** context) {
  if (context == nullptr) return kNcclSuccess;
  *context = nullptr;
  try {
    *context = new Tuner(setup);
  } catch (const std::exception&) {  // no memory: a null context changes nothing
  }
  return kNcclSuccess;
}

int init3(size_t n_ranks, size_t n_nodes, Logger log, void** context) {
  return make({.n_ranks = n_ranks, .n_nodes = n_nodes, .log = log}, context);
}

int init5(void** context, uint64_t /*comm_id*/, size_t n_ranks, size_t n_nodes, Logger log, NvlDomains* domains,
          Constants* constants) {
  return make({.n_ranks = n_ranks, .n_nodes = n_nodes, .log = log, .domains = domains, .constants = constants},
              context);
}

int get_coll_info(void* context, int function, size_t bytes, int n_ops, float** table, int n_algorithms,
                  int n_protocols, int /*registered*/, int* /*n_channels: NCCL's own*/) {
  if (context == nullptr) return kNcclSuccess;
  try {
    // Declared as rows, but passed as one block.
    static_cast<Tuner*>(context)->ask(function, bytes, n_ops, reinterpret_cast<float*>(table), n_algorithms,
                                      n_protocols);
  } catch (const std::exception&) {  // no memory for a line of the log
  }
  return kNcclSuccess;
}

int get_coll_info3(void* context, int function, size_t bytes, int n_ops, float** table, int n_algorithms,
                   int n_protocols, int* n_channels) {
  return get_coll_info(context, function, bytes, n_ops, table, n_algorithms, n_protocols, 0, n_channels);
}

int end(void* context) {
  delete static_cast<Tuner*>(context);
  return kNcclSuccess;
}

}  // namespace
}  // namespace moeccl::tuner

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace moeccl::tuner;
EXPORT PluginV3 ncclTunerPlugin_v3;
EXPORT PluginV4 ncclTunerPlugin_v4;
EXPORT PluginV5 ncclTunerPlugin_v5;
EXPORT PluginV6 ncclTunerPlugin_v6, ncclTunerPlugin_v7;
PluginV3 ncclTunerPlugin_v3 = {kName, init3, get_coll_info3, end};
PluginV4 ncclTunerPlugin_v4 = {kName, init3, get_coll_info, end};
PluginV5 ncclTunerPlugin_v5 = {kName, init5, get_coll_info, end};
PluginV6 ncclTunerPlugin_v6 = {kName, init5, get_coll_info, end, nullptr};
PluginV6 ncclTunerPlugin_v7 = {kName, init5, get_coll_info, end, nullptr};
