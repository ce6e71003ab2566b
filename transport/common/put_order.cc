#include "transport/common/put_order.h"

namespace moeccl::transport {

PutOrder& process_put_order() {
  static PutOrder order;
  return order;
}

}  // namespace moeccl::transport
