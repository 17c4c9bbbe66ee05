// A device in host memory, registered as PyTorch's PrivateUse1. Its operators run on the CPU, but
// tensors of the CPU (except numbers, and indices) and of the device cannot meet in one operator.
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

namespace {
using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> bytes_in_use{0}, operations{0};
bool has_float64 = true, has_bfloat16 = true;

void check(c10::ScalarType type) {
  const bool lacks = ((type == at::kDouble || type == at::kComplexDouble) && !has_float64) ||
                     (type == at::kBFloat16 && !has_bfloat16);
  TORCH_CHECK_TYPE(!lacks, "The device second has no ", c10::toString(type));
}

// --- memory ---

struct Block {
  size_t size;
  void* data;
};
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_in_use -= block->size;
  std::free(block->data);
  delete block;
}
struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, [](void*) {}, at::Device(TYPE, 0)};
    auto* block = new Block{size, std::malloc(size)};
    std::memset(block->data, 0x7f, size);  // what is read before it is written shows
    bytes_in_use += size;
    return {block->data, block, &release, at::Device(TYPE, 0)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

// --- one device, one stream ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
  c10::Device getDevice() const override { return {TYPE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void init() const override {}
};

// --- operators that a device must have of its own ---

Tensor empty(IntArrayRef size, optional<c10::ScalarType> dtype, optional<c10::Layout>,
             optional<c10::Device>, optional<bool>, optional<c10::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  check(type);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<c10::ScalarType> dtype,
                     optional<c10::Layout>, optional<c10::Device>, optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  check(type);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}
// The device's memory as a tensor of the CPU, for use in here alone.
Tensor seen_by_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  const auto count = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  return at::from_blob(tensor.storage().mutable_data(), {count}, at::TensorOptions().dtype(tensor.scalar_type()))
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.numel()) seen_by_host(to).copy_(seen_by_host(from));
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const Tensor& tensor) { return seen_by_host(tensor).item(); }
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, optional<c10::SymInt> offset) {
  optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
const Tensor& resize_(const Tensor& self, SymIntArrayRef shape, optional<c10::MemoryFormat>) {
  const auto size = C10_AS_INTARRAYREF_SLOW(shape);
  int64_t needed = self.itemsize();
  for (auto length : size) needed *= length;
  auto storage = self.storage();
  if (static_cast<int64_t>(storage.nbytes()) < needed) {
    auto larger = memory.allocate(needed);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* inner = self.unsafeGetTensorImpl();
  inner->set_storage_keep_dtype(std::move(storage));
  inner->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  inner->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sym_sizes(), other.sym_strides());
}
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool, optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// --- all other operators ---

// As on other devices, their indices may be on the CPU.
const std::unordered_set<std::string> WITH_INDICES = {
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operations += 1;
  const auto& schema = op.schema();
  const bool with_indices = WITH_INDICES.count(schema.name()) != 0;
  bool here = false, on_cpu = false;
  auto see = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) {
      here = true;
      check(tensor.scalar_type());
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      on_cpu = true;
    }
  };
  const auto count = schema.arguments().size();
  for (size_t i = 0; i < count; i++) {
    const auto& value = (*stack)[stack->size() - count + i];
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isList() && !with_indices) {
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor()) see(item.toTensor());
    } else if (value.isInt() && schema.arguments()[i].name() == "dtype") {
      check(value.toScalarType());
    }
  }
  TORCH_CHECK(!(here && on_cpu), "Expected all tensors on one device, but found second:0 and cpu (", schema.name(), ")");
  at::native::cpu_fallback(op, stack, false);
}
}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { static Hooks hooks; at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("used_bytes", [] { return bytes_in_use.load(); });
  m.def("operations", [] { return operations.load(); });
  m.def("allow", [](const std::string& dtype, bool has) { (dtype == "float64" ? has_float64 : has_bfloat16) = has; });
}
