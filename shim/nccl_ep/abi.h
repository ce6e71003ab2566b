/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The binary interface of NCCL EP 0.1 (API version 2), declared by hand: names, values and layouts that programs built
 * against its own header rely on. A struct that a program passes begins with its size and a magic number, and grows
 * only at its end; sizes that a version froze are named here. Compiles as C11 and C++.
 */
#ifndef MOECCL_SHIM_NCCL_EP_ABI_H_
#define MOECCL_SHIM_NCCL_EP_ABI_H_

#include "shim/nccl/abi.h"

#ifdef __cplusplus
#define NCCL_EP_INT : int /* so that a program's wrong number can be looked at */
extern "C" {
#else
#define NCCL_EP_INT
#endif

#define NCCL_EP_MAJOR 0
#define NCCL_EP_MINOR 1
#define NCCL_EP_PATCH 0
#define NCCL_EP_VERSION_CODE 100
#define NCCL_EP_API_VERSION 2
#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu
#define NCCL_EP_AUTO 0

/* Packed pairs of 4-bit numbers. NCCL has reserved this number of ncclDataType_t. */
#define MOECCL_NCCL_FLOAT4X2 12

typedef int cudaErrorCode_t; /* cudaError_t, an int in the binary interface */

typedef enum NCCL_EP_INT { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 } ncclEpAlgorithm_t;
typedef enum NCCL_EP_INT {
  NCCL_EP_OVERFLOW_AUTO = 0, /* trap */
  NCCL_EP_OVERFLOW_TRAP = 1,
  NCCL_EP_OVERFLOW_DROP = 2
} ncclEpOverflowPolicy_t;
typedef enum NCCL_EP_INT {
  NCCL_EP_LAYOUT_UNSET = 0,
  NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
  NCCL_EP_LAYOUT_RANK_MAJOR = 2, /* low latency only */
  NCCL_EP_LAYOUT_FLAT = 3        /* high throughput only */
} ncclEpLayout_t;
typedef enum NCCL_EP_INT { NCCL_EP_FWD_PASS = 0, NCCL_EP_BWD_PASS = 1 } ncclEpPassDir_t;
typedef enum NCCL_EP_INT {
  NCCL_EP_ZERO_COPY_AUTO = 0,
  NCCL_EP_ZERO_COPY_OFF = 1,
  NCCL_EP_ZERO_COPY_ON = 2
} ncclEpZeroCopyMode_t;
typedef enum NCCL_EP_INT {
  NCCL_EP_EXPERT_ID_AUTO = 0, /* local */
  NCCL_EP_EXPERT_ID_LOCAL = 1,
  NCCL_EP_EXPERT_ID_GLOBAL = 2
} ncclEpExpertIdKind_t;
typedef enum NCCL_EP_INT {
  NCCL_EP_DISP_QUANT_NONE = 0,
  NCCL_EP_DISP_QUANT_FWD = 1, /* scales travel beside the rows */
  NCCL_EP_DISP_QUANT_DS_FP8E3M4 = 2
} ncclEpDispQuant_t;
typedef enum NCCL_EP_INT { NCCL_EP_COMB_QUANT_NONE = 0, NCCL_EP_COMB_QUANT_NVFP4 = 1 } ncclEpCombQuant_t;

typedef struct ncclEpTensor {
  unsigned int size, magic;
  unsigned int ndim;
  ncclDataType_t datatype;
  void* data;           /* or NULL with a window */
  ncclWindow_t win_hdl; /* the tensor begins win_offset bytes into its memory */
  uint64_t win_offset;
  size_t* sizes; /* [ndim] */
} ncclEpTensor_t;

typedef struct {
  unsigned int size, magic;
} ncclEpTensorAllocConfig_t;

typedef struct {
  cudaErrorCode_t (*alloc_fn)(void** ptr, size_t size, void* context);
  cudaErrorCode_t (*free_fn)(void* ptr, void* context);
  void* context;
} ncclEpAllocConfig_t;

typedef struct {
  unsigned int size, magic, version;
  ncclEpAlgorithm_t algorithm;
  unsigned int num_experts;
  unsigned int max_dispatch_tokens_per_rank;
  unsigned int max_recv_tokens_per_rank;
  unsigned int max_token_bytes;
  unsigned long int rdma_buffer_size;
  unsigned int num_qp_per_rank, num_channels, max_num_sms;
  ncclEpAllocConfig_t alloc;
  unsigned int enable_mask;
  uint64_t timeout_ns;
  ncclEpZeroCopyMode_t zero_copy; /* from here on since API version 2 */
  ncclEpOverflowPolicy_t overflow_policy;
  unsigned int num_topk;
  unsigned char padding_v2[4];
} ncclEpGroupConfig_t;

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* expert_counters;
  ncclEpTensor_t* src_rank_counters;
  ncclEpTensor_t* expert_offsets;
  ncclEpTensor_t* recv_total_counter;
  ncclEpExpertIdKind_t recv_topk_idx_kind; /* from here on since API version 2 */
  unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;
  ncclEpTensor_t* topk_weights;
  ncclEpTensor_t* scales;
} ncclEpDispatchInputs_t;

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;
  ncclEpTensor_t* topk_weights;
  ncclEpTensor_t* scales;
  ncclEpTensor_t* topk_idx;
} ncclEpDispatchOutputs_t;

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;
  ncclEpTensor_t* topk_weights;
  ncclEpTensor_t* scales; /* since API version 2 */
} ncclEpCombineInputs_t;

typedef struct {
  unsigned int size, magic;
  ncclEpTensor_t* tokens;
  ncclEpTensor_t* topk_weights;
} ncclEpCombineOutputs_t;

typedef struct {
  unsigned int size, magic;
  size_t dispatch_output_per_expert_alignment;
} ncclEpHandleConfig_t;

typedef struct {
  unsigned int size, magic;
  unsigned int send_only, round_scales;
  ncclEpPassDir_t pass_direction;
  ncclEpDispQuant_t quant_recipe; /* since API version 2 */
} ncclEpDispatchConfig_t;

typedef struct {
  unsigned int size, magic;
  unsigned int send_only;
  ncclEpPassDir_t pass_direction;
  ncclEpCombQuant_t quant_recipe; /* since API version 2 */
} ncclEpCombineConfig_t;

typedef struct {
  unsigned int size, magic;
} ncclEpCompleteConfig_t;

/* The sizes of API version 1, the least that a program may pass. */
#define NCCL_EP_TENSOR_V1_SIZE 48u
#define NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE 8u
#define NCCL_EP_GROUP_CONFIG_V1_SIZE 96u
#define NCCL_EP_LAYOUT_INFO_V1_SIZE 40u
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE 32u
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE 40u
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE 24u
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE 24u
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE 16u
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE 20u
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE 16u
#define NCCL_EP_COMPLETE_CONFIG_V1_SIZE 8u

typedef struct ncclEpGroup* ncclEpGroup_t;
typedef struct ncclEpHandle* ncclEpHandle_t;

#define NCCL_EP_FUNCTION(name, parameters, arguments) ncclResult_t ncclEp##name parameters;
#include "shim/nccl_ep/functions.def"
#undef NCCL_EP_FUNCTION

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SHIM_NCCL_EP_ABI_H_ */
