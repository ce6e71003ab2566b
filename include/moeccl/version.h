/* SPDX-License-Identifier: Apache-2.0 */
/* The version of these headers; moecclGetVersion() gives the version of the library that is loaded. */
#ifndef MOECCL_VERSION_H_
#define MOECCL_VERSION_H_

#define MOECCL_VERSION_MAJOR 0
#define MOECCL_VERSION_MINOR 1
#define MOECCL_VERSION_PATCH 0

/* One comparable number, as NCCL's: 0.1.0 -> 100, 1.2.3 -> 10203. */
#define MOECCL_VERSION (MOECCL_VERSION_MAJOR * 10000 + MOECCL_VERSION_MINOR * 100 + MOECCL_VERSION_PATCH)

#endif /* MOECCL_VERSION_H_ */
