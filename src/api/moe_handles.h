// SPDX-License-Identifier: Apache-2.0
// Layers and routings as C callers hold them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "src/api/convert.h"
#include "src/moe/communicator_host.h"
#include "src/moe/moe_layer.h"

namespace moeccl::api {

// A layer with the channel on which it runs. Routings share it, so a layer may be destroyed before its routings.
struct Layer {
  Layer(moecclComm_t h, comm::Communicator& c) : comm_handle(h), channel(c) {}
  moecclComm_t comm_handle;
  comm::CommunicatorHost channel;
  std::unique_ptr<comm::MoeLayer> moe;
};
struct LayerHandle {
  static constexpr Words kWords{"moe", "layer", "moecclMoeCreate", "the layer's"};
  moecclComm_t comm() const { return layer->comm_handle; }
  const std::shared_ptr<Layer>& object() const { return layer; }
  std::shared_ptr<Layer> layer;
};
struct RoutingHandle {
  static constexpr Words kWords{"routing", "routing", "moecclRoutingCreate", "the routing's"};
  explicit RoutingHandle(std::shared_ptr<Layer> l) : layer(std::move(l)), routing(*layer->moe) {}
  moecclComm_t comm() const { return layer->comm_handle; }
  comm::MoeRouting& object() { return routing; }
  std::shared_ptr<Layer> layer;
  comm::MoeRouting routing;
};
using LayerTable = HandleTable<LayerHandle, moecclMoe_t, 0xC3>;
using RoutingTable = HandleTable<RoutingHandle, moecclRouting_t, 0xC4>;

// Runs a backward pass of combine. The gradient of the weights, which has n_weights() elements, is gathered on the
// host.
template <class Object, class Count>
Status combine_backward(Object& object, comm::Communicator& comm, comm::MoeRouting::CombineGradients g,
                        Count&& n_weights, comm::Stream* stream) {
  MOECCL_TRY(comm.check_reach({g.grad_weight}));
  if (g.grad_weight == nullptr || !comm.is_device_memory(g.grad_weight)) return object.combine_backward(g, stream);
  MOECCL_ASSIGN_OR_RETURN(const size_t n, n_weights());
  std::vector<float> weights(n + 1);
  float* device = std::exchange(g.grad_weight, weights.data());
  MOECCL_TRY(object.combine_backward(g, stream));
  return comm.copy_across(device, weights.data(), n * sizeof(float));
}

}  // namespace moeccl::api
