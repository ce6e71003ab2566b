// SPDX-License-Identifier: Apache-2.0
#include "src/driver/ibv_api.h"

#include "src/driver/dynamic_library.h"

namespace moeccl::driver {

Result<IbvApi> IbvApi::load(const std::string& path) {
  MOECCL_ASSIGN_OR_RETURN(DynamicLibrary library, DynamicLibrary::open(path, {"libibverbs.so.1"}));
  IbvApi api = {};
  Status status;
  const auto must = [&](const char* name, auto** function) {
    if (status.ok()) status = library.resolve(name, function);
  };
  must("ibv_get_device_list", &api.get_device_list);
  must("ibv_free_device_list", &api.free_device_list);
  must("ibv_open_device", &api.open_device);
  must("ibv_close_device", &api.close_device);
  must("ibv_query_device", &api.query_device);
  must("ibv_query_port", &api.query_port);
  must("ibv_query_gid", &api.query_gid);
  const auto may = [&](const char* name, auto** function) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(library.symbol(name));
  };
  may("ibv_alloc_pd", &api.alloc_pd);
  may("ibv_dealloc_pd", &api.dealloc_pd);
  may("ibv_reg_mr", &api.reg_mr);
  may("ibv_dereg_mr", &api.dereg_mr);
  may("ibv_create_cq", &api.create_cq);
  may("ibv_destroy_cq", &api.destroy_cq);
  may("ibv_create_qp", &api.create_qp);
  may("ibv_modify_qp", &api.modify_qp);
  may("ibv_destroy_qp", &api.destroy_qp);
  may("ibv_get_async_event", &api.get_async_event);
  may("ibv_ack_async_event", &api.ack_async_event);
  may("ibv_wc_status_str", &api.wc_status_str);
  may("ibv_reg_mr_iova2", &api.reg_mr_iova2);
  may("ibv_reg_dmabuf_mr", &api.reg_dmabuf_mr);
  may("ibv_fork_init", &api.fork_init);
  may("_ibv_query_gid_ex", &api.query_gid_ex);
  library.keep();
  if (!status.ok()) return status;
  return api;
}

Status IbvApi::complete() const {
  const bool all = alloc_pd != nullptr && dealloc_pd != nullptr && reg_mr != nullptr && dereg_mr != nullptr &&
                   create_cq != nullptr && destroy_cq != nullptr && create_qp != nullptr && modify_qp != nullptr &&
                   destroy_qp != nullptr && get_async_event != nullptr && ack_async_event != nullptr &&
                   wc_status_str != nullptr;
  if (all) return {};
  return error(moecclUnsupported, "libibverbs lacks functions that moving data needs: it is too old");
}

}  // namespace moeccl::driver
