// The device `cuda` of a torch that was built without CUDA, with CPU memory behind it.
//
// A tensor on it is a real tensor: it knows its device, its memory is counted and limited, and an operator that gets
// one together with a tensor of another device raises, as on a card. Every operator is run by torch's CPU kernel on
// tensors that share the memory. What a card does differently (kernels, streams, precision, speed) is not covered.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using at::Device, at::DeviceIndex, at::Storage, at::StorageImpl, at::Tensor, at::TensorImpl, at::Generator;
using c10::DispatchKey, c10::DispatchKeySet, c10::IValue;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 16;
constexpr size_t GRANULE = 512;  // torch's caching allocator rounds every block up to it

DeviceIndex num_devices = 1;
thread_local DeviceIndex current_index = 0;

// ---- memory ----

struct Memory {
  int64_t now = 0, peak = 0, limit = INT64_MAX;
  std::string no_memory, no_kernels;  // the driver's message where an allocation, or any operator, fails
};
std::mutex memory_lock;
std::array<Memory, MOST_DEVICES> memories;

void take(DeviceIndex device, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(memory_lock);
  Memory& memory = memories.at(device);
  TORCH_CHECK(memory.no_memory.empty(), memory.no_memory);
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory.now + num_bytes <= memory.limit, "CUDA out of memory. Tried to allocate ", num_bytes,
      " bytes. GPU ", static_cast<int>(device), " has ", memory.limit - memory.now, " of ", memory.limit, " bytes free.");
  memory.now += num_bytes;
  memory.peak = std::max(memory.peak, memory.now);
}

struct Block {  // what a pointer on the device stands for: memory of its own, or what a CPU kernel allocated
  void* own;
  Storage held;
  DeviceIndex device;
  int64_t num_bytes;
};

void drop(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->own != nullptr) c10::free_cpu(block->own);
  {
    std::lock_guard<std::mutex> guard(memory_lock);
    memories.at(block->device).now -= block->num_bytes;
  }
  delete block;
}

at::DataPtr on_device(void* pointer, void* own, Storage held, DeviceIndex device, size_t num_bytes) {
  const auto counted = static_cast<int64_t>((num_bytes + GRANULE - 1) / GRANULE * GRANULE);
  take(device, counted);
  return {pointer, new Block{own, std::move(held), device, counted}, &drop, Device(CUDA, device)};
}

at::DataPtr allocate(DeviceIndex device, size_t num_bytes) {
  void* pointer = num_bytes > 0 ? c10::alloc_cpu(num_bytes) : nullptr;
  return on_device(pointer, pointer, Storage(), device, num_bytes);
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    return ::allocate(current_index, num_bytes);
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};
DeviceAllocator device_allocator;

// Page-locked memory of the host: ordinary memory whose addresses are remembered.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned_blocks;

void unpin(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks.erase(static_cast<char*>(pointer));
  }
  c10::free_cpu(pointer);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* pointer = c10::alloc_cpu(std::max<size_t>(num_bytes, 1));
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks[static_cast<char*>(pointer)] = std::max<size_t>(num_bytes, 1);
    return {pointer, pointer, &unpin, Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned_blocks.begin()) return false;
  auto [start, size] = *std::prev(after);
  return static_cast<const char*>(pointer) < start + size;
}

// ---- random numbers ----

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device, Generator inner)
      : GeneratorImpl(Device(CUDA, device), DispatchKeySet(DispatchKey::CUDA)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), inner.clone()); }

  Generator inner;
};

Generator new_generator(DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

const Generator& default_generator(DeviceIndex device) {
  static const std::vector<Generator> all = [] {
    std::vector<Generator> made;
    for (int index = 0; index < MOST_DEVICES; index++) made.push_back(new_generator(static_cast<DeviceIndex>(index)));
    return made;
  }();
  return all.at(device < 0 ? current_index : device);
}

Generator on_cpu(const Generator& generator) {
  return generator.device().type() == CUDA ? static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner
                                           : generator;
}

// ---- device, streams, events: there is one stream, and it has always finished ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    current_index = device.index();
    return before;
  }
  Device getDevice() const override { return {CUDA, current_index}; }
  void setDevice(Device device) const override { current_index = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_index = device.index(); }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = &num_devices;  // any address: recorded
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? current_index : device);
  }
  Device getDeviceFromPtr(void*) const override { return {CUDA, current_index}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex current_device() const override { return current_index; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  void setCurrentDevice(DeviceIndex device) const override { current_index = device; }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_index, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex) const override {}
};

// torch asks its registry for the hooks once, which a forked process may have done before this library came: the object
// that it holds is replaced where it lies.
const auto* const hooks = [] {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  c10::SetAllocator(CUDA, &device_allocator);
  return new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}();

// ---- operators ----

// Those that take tensors of two devices on a card too.
const std::set<std::string> takes_two_devices{
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    // States of a paged optimizer lie in managed memory, in tensors that say `cpu`.
    "bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise"};

void release_storage(void* context) {
  delete static_cast<Storage*>(context);
}

// CPU tensors for the tensors of one call, and the way back.
class Aliases {
 public:
  explicit Aliases(const c10::OperatorHandle& op) : op_(op), may_mix_(takes_two_devices.count(op.schema().name()) > 0) {}

  IValue to_cpu(const IValue& value, bool is_written) {
    if (value.isTensor()) return to_cpu(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& each : value.toTensorVector()) found.push_back(to_cpu(each, is_written));
      return found;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> found;
      for (const IValue& each : value.toListRef()) {
        found.push_back(each.isNone() ? std::nullopt : std::optional(to_cpu(each.toTensor(), is_written)));
      }
      return found;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {  // of all_gather
      c10::List<c10::List<Tensor>> found;
      for (const IValue& each : value.toListRef()) found.push_back(to_cpu(each, is_written).toTensorList());
      return found;
    }
    if (value.isDevice() && value.toDevice().type() == CUDA) {
      see(value.toDevice());
      return Device(c10::DeviceType::CPU);
    }
    if (value.isGenerator()) return on_cpu(value.toGenerator());
    return value;
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& each : value.toTensorVector()) found.push_back(to_device(each));
      return found;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
      c10::List<c10::List<Tensor>> found;
      for (const IValue& each : value.toListRef()) found.push_back(to_device(each).toTensorList());
      return found;
    }
    return value;
  }

  // What a kernel did to the shape or the storage of a tensor that it writes to.
  void keep_changes() {
    for (auto& [original, alias] : written_) {
      auto* impl = original.unsafeGetTensorImpl();
      StorageImpl* storage = original.storage().unsafeGetStorageImpl();
      const Storage& on_cpu = alias.storage();
      if (on_cpu.data() != storage->data() || on_cpu.nbytes() != storage->nbytes()) {
        storage->set_data_ptr_noswap(wrapped(on_cpu));
        storage->set_nbytes(on_cpu.nbytes());
      }
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset()) {
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  DeviceIndex device() const { return device_.value_or(current_index); }

 private:
  void see(Device place) {
    const DeviceIndex index = place.has_index() ? place.index() : current_index;
    TORCH_CHECK(
        may_mix_ || device_.value_or(index) == index, op_.schema().name(), ": Expected all tensors to be on the same device, ",
        "but found at least two devices, cuda:", static_cast<int>(index), " and cuda:", static_cast<int>(device()), "!");
    device_ = index;
  }

  Tensor to_cpu(const Tensor& tensor, bool is_written) {
    if (!tensor.defined() || tensor.is_meta()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          may_mix_ || (tensor.dim() == 0 && !is_written), op_.schema().name(), ": Expected all tensors to be on the same ",
          "device, but found at least two devices, cuda and ", tensor.device(), "!");
      return tensor;
    }
    see(tensor.device());
    const Storage& storage = tensor.storage();
    auto& on_cpu = cpu_storages_[storage.unsafeGetStorageImpl()];
    if (!on_cpu) {
      at::DataPtr pointer(storage.mutable_data(), new Storage(storage), &release_storage, Device(c10::DeviceType::CPU));
      on_cpu = Storage(
          Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(), /*resizable=*/true);
      device_storages_.emplace(on_cpu.unsafeGetStorageImpl(), storage);
    }
    Tensor alias = made(on_cpu, DispatchKey::CPU, tensor);
    originals_.emplace(alias.unsafeGetTensorImpl(), std::pair(alias, tensor));
    if (is_written) written_.emplace_back(tensor, alias);
    return alias;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto original = originals_.find(tensor.unsafeGetTensorImpl());
    if (original != originals_.end()) return original->second.second;
    auto known = device_storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (known == device_storages_.end()) {
      Storage fresh(
          Storage::use_byte_size_t(), tensor.storage().nbytes(), wrapped(tensor.storage()), &device_allocator,
          /*resizable=*/true);
      known = device_storages_.emplace(tensor.storage().unsafeGetStorageImpl(), fresh).first;
    }
    return made(known->second, DispatchKey::CUDA, tensor);
  }

  at::DataPtr wrapped(const Storage& storage) {
    return on_device(storage.mutable_data(), nullptr, storage, device(), storage.nbytes());
  }

  static Tensor made(const Storage& storage, DispatchKey key, const Tensor& like) {
    Tensor tensor = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    tensor._set_conj(like.is_conj());
    tensor._set_neg(like.is_neg());
    return tensor;
  }

  const c10::OperatorHandle& op_;
  bool may_mix_;
  std::optional<DeviceIndex> device_;
  std::unordered_map<StorageImpl*, Storage> cpu_storages_, device_storages_;
  std::unordered_map<TensorImpl*, std::pair<Tensor, Tensor>> originals_;  // alias and tensor, by the alias
  std::vector<std::pair<Tensor, Tensor>> written_;
};

void run_as(DispatchKey key, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Aliases aliases(op);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t index = 0; index < arguments.size(); index++) {
    IValue& value = (*stack)[first + index];
    const auto* alias = arguments[index].alias_info();
    value = aliases.to_cpu(value, alias != nullptr && alias->isWrite());
  }
  // What draws without a generator of its own draws from the device's.
  for (size_t index = 0; index < arguments.size(); index++) {
    IValue& value = (*stack)[first + index];
    if (value.isNone() && arguments[index].name() == "generator") value = on_cpu(default_generator(aliases.device()));
  }
  const std::string& failure = memories.at(aliases.device()).no_kernels;
  TORCH_CHECK(failure.empty() || op.schema().name().rfind("aten::empty", 0) == 0, failure);
  op.redispatchBoxed(DispatchKeySet(key), stack);
  aliases.keep_changes();
  const size_t num_results = op.schema().returns().size();
  for (size_t index = stack->size() - num_results; index < stack->size(); index++) {
    (*stack)[index] = aliases.to_device((*stack)[index]);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  run_as(DispatchKey::CPU, op, stack);
}

Tensor& set_to_nothing(Tensor& self) {
  const Device device = self.device();
  Storage empty(
      Storage::use_byte_size_t(), 0, allocate(device.index(), 0), &device_allocator, /*resizable=*/true);
  return at::native::set_storage_cpu_(self, empty, 0, {0}, {});
}

void forget_stream(Tensor&, c10::Stream) {}

void resize_storage(const Tensor& tensor, int64_t num_bytes) {
  StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  at::DataPtr fresh = allocate(tensor.device().index(), num_bytes);
  const size_t num_kept = std::min<size_t>(storage->nbytes(), num_bytes);
  if (num_kept > 0) std::memcpy(fresh.get(), storage->data(), num_kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());  // the general kernel knows no such device
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_", TORCH_FN(set_to_nothing));
  library.impl("record_stream", TORCH_FN(forget_stream));
}

TORCH_LIBRARY_IMPL(bitsandbytes, CUDA, library) {  // whose general kernels would come before its kernels for the CPU
  for (const char* name :
       {"optimizer_update_32bit", "optimizer_update_8bit_blockwise", "quantize_blockwise", "dequantize_blockwise",
        "dequantize_blockwise.out", "quantize_4bit", "dequantize_4bit", "dequantize_4bit.out", "gemv_4bit",
        "gemv_4bit.out", "gemm_4bit"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY(fake_cuda, library) {
  library.def("resize_storage(Tensor tensor, int num_bytes) -> ()", &resize_storage);
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<DeviceIndex>(device));
  });
}

// ---- collectives: groups of NCCL are Gloo's, which is registered for `privateuseone` beside `cuda` ----

// An operator of c10d looks for the backend of its dispatch key; a CPU tensor finds none in a group of NCCL.
void run_on_gloo(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  run_as(DispatchKey::PrivateUse1, op, stack);
}

struct Silence : c10::WarningHandler {  // about kernels that are replaced
  void process(const c10::Warning&) override {}
};

const bool collectives = [] {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "broadcast_", "gather_", "scatter_", "alltoall_", "alltoall_base_",
        "barrier", "send", "recv_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_gloo>());
  }
  return true;
}();

}  // namespace

// ---- for Python ----

extern "C" {
void fake_cuda_set_num_devices(int count) {
  num_devices = static_cast<DeviceIndex>(count);
}
int fake_cuda_exchange_device(int device) {
  return device < 0 ? current_index : std::exchange(current_index, static_cast<DeviceIndex>(device));
}
void fake_cuda_set_limit(int device, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(memory_lock);
  memories.at(device).limit = num_bytes;
}
void fake_cuda_fail(int device, const char* no_memory, const char* no_kernels) {
  memories.at(device).no_memory = no_memory;
  memories.at(device).no_kernels = no_kernels;
}
int64_t fake_cuda_allocated(int device) {
  std::lock_guard<std::mutex> guard(memory_lock);
  return memories.at(device).now;
}
int64_t fake_cuda_peak(int device) {
  std::lock_guard<std::mutex> guard(memory_lock);
  return memories.at(device).peak;
}
void fake_cuda_reset_peak(int device) {
  std::lock_guard<std::mutex> guard(memory_lock);
  memories.at(device).peak = memories.at(device).now;
}
}
