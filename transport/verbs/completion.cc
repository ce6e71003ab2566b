// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/completion.h"

namespace moeccl::transport::verbs {

using namespace driver::ibv_abi;

const char* hint_of(int status) {
  switch (status) {
    case kRetryExceeded:
      // In nearly all reports of NCCL's users this is a wrong GID or no route (NVIDIA/nccl #426, #902, #1405, #1664).
      return "its host does not answer: the process or host is gone, or there is no way between these two addresses "
             "(MOECCL_IB_GID_INDEX, MOECCL_IB_HCA, the routes and MTU of both NICs)";
    case kRnrExceeded:
      return "it takes no messages: does it run the same MoECCL?";
    case kRemoteAccess:
      return "it does not let this memory be written: a region was taken back, or its process was replaced";
    case kRemoteInvalid:
      return "its NIC refuses the request: do all ranks run the same MoECCL?";
    case kRemoteOperation:
      return "its NIC failed";
    case kLocalProtection:
      return "memory of this rank is not registered any more: was it freed while an operation used it?";
    case kFlushed:
      return "an earlier request of this queue pair failed";
    default:
      return "";
  }
}

Status completion_error(const Rail& rail, const FarEnd& peer, int status, uint32_t vendor, int64_t now_ns) {
  const char* const text = rail.api().wc_status_str(status);
  const std::string trouble = rail.trouble(now_ns);
  const std::string hint = trouble.empty() ? hint_of(status) : trouble;
  return error(moecclRemoteError, "{} ({}) to rank {} at {}: {} (status {}, vendor {}){}{}", rail.info().name(),
               text_of(rail.info().gid.gid), peer.rank, peer.where, text == nullptr ? "unknown status" : text, status,
               vendor, hint.empty() ? "" : ": ", hint);
}

}  // namespace moeccl::transport::verbs
