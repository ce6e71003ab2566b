// SPDX-License-Identifier: Apache-2.0
#include "src/driver/ibv_api.h"

#include "src/driver/dynamic_library.h"

namespace moeccl::driver {

Result<IbvApi> IbvApi::load(const std::string& path) {
  MOECCL_ASSIGN_OR_RETURN(DynamicLibrary library, DynamicLibrary::open(path, {"libibverbs.so.1"}));
  IbvApi api = {};
  library.maybe("ibv_reg_mr_iova2", &api.reg_mr_iova2, "ibv_reg_dmabuf_mr", &api.reg_dmabuf_mr, "ibv_fork_init",
                &api.fork_init, "_ibv_query_gid_ex", &api.query_gid_ex);
  const Status status = library.resolve(
      "ibv_get_device_list", &api.get_device_list, "ibv_free_device_list", &api.free_device_list, "ibv_open_device",
      &api.open_device, "ibv_close_device", &api.close_device, "ibv_query_device", &api.query_device, "ibv_query_port",
      &api.query_port, "ibv_query_gid", &api.query_gid, "ibv_alloc_pd", &api.alloc_pd, "ibv_dealloc_pd",
      &api.dealloc_pd, "ibv_reg_mr", &api.reg_mr, "ibv_dereg_mr", &api.dereg_mr, "ibv_create_cq", &api.create_cq,
      "ibv_destroy_cq", &api.destroy_cq, "ibv_create_qp", &api.create_qp, "ibv_modify_qp", &api.modify_qp,
      "ibv_destroy_qp", &api.destroy_qp, "ibv_get_async_event", &api.get_async_event, "ibv_ack_async_event",
      &api.ack_async_event, "ibv_wc_status_str", &api.wc_status_str);
  library.keep();
  MOECCL_TRY(status);
  return api;
}

}  // namespace moeccl::driver
