/* What each call does before the GPU has something to do: see that it is like one before, and launch. See native.py.

   Tensors are read through the functions that they offer to C (DLPack 1.3, `__dlpack_c_exchange_api__`), for none of the
   headers of PyTorch is there for sure. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MAP_BYTES = 128, MOST_BYTES = 4096, MOST_PARAMETERS = 256, MOST_TENSORS = 32, MOST_WORDS = 256, KEPT = 64 };
enum { CPU = 1, GPU = 2, INTEGER = 0, NATURAL = 1, BFLOAT = 4 }; /* devices and kinds of types, as in dlpack.h */

/* As in dlpack.h. */
typedef struct { int32_t type, index; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } Type;
typedef struct {
    char *data;
    Device device;
    int32_t axes;
    Type type;
    int64_t *shape, *strides;
    uint64_t offset;
} View;
typedef struct Exchange {
    uint32_t major, minor;
    struct Exchange *older;
    void *allocate, *export, *import;
    int (*view)(void *tensor, View *found);
    int (*stream)(int32_t type, int32_t index, void **found);
} Exchange;

#define NOWHERE ((char *)1) /* where no tensor of a launch begins */

static const Exchange *exchange;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *is_negative;   /* "is_neg" */
static PyObject *requires_grad; /* "requires_grad" */
static PyObject *devices;       /* ("cpu", "cuda") */
static PyObject *kept[KEPT];    /* signatures that were made, each in the place that it asks for; they keep their hashes */

/* Of torch. */
static PyObject *interceptors, *idle, *is_deterministic, *is_grad_enabled, *any_autocast, *is_autocast, *autocast_dtype;

/* Of the driver; 0 is success. */
static int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                            void **);
static int (*replace_address)(void *, void *);
static int (*set_bytes)(void *, unsigned char, size_t, void *);
static int (*is_capturing)(void *, int *);
static int (*current_context)(void **);

/* Where a tensor is, and what it is of; 0 for what is no tensor with memory of its own. */
static int view(PyObject *tensor, View *found)
{
    if (exchange == NULL || !PyObject_TypeCheck(tensor, tensor_type))
        return 0;
    if (exchange->view(tensor, found) != 0) {
        PyErr_Clear();
        return 0;
    }
    found->data += found->offset;
    return 1;
}

/* The current stream of a device; 0 if nothing tells. */
static int current_stream(const Device *device, void **stream)
{
    if (exchange->stream(device->type, device->index, stream) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

/* Whether a graph is being captured on it, 1 or 0, or -1 if nothing tells. */
static int captured(const Device *device, void **stream)
{
    int found;
    return current_stream(device, stream) && is_capturing(*stream, &found) == 0 ? found != 0 : -1;
}

/* Launches of one kernel that differ in the addresses of tensors alone.

   In memory the parameters are in this order: tensor maps, the addresses of the tensors, values. The interpreter's lock
   guards it. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *switches, *otherwise;
    void *function, *context;
    unsigned programs, threads, shared;
    int arguments, tensors, maps, parameters, bytes;
    Device device;
    Type types[MOST_TENSORS];             /* of the tensors, or of the memory that they lie in */
    char given[MOST_TENSORS];             /* of each argument, whether it is a tensor and not None */
    int64_t starts[MOST_TENSORS];         /* of the tensors, bytes before them in what is given */
    int mapped[MOST_TENSORS];             /* of each map, the tensor */
    char *map_addresses[MOST_TENSORS];    /* that maps hold */
    int offsets[MOST_PARAMETERS];         /* of parameters in memory */
    char *memory, *allocated;
} Launch;

/* Whether none of the attributes that objects have of their own tells Triton to do more than launch. */
static int undisturbed(PyObject *switches)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(switches); i++) {
        PyObject *one = PyTuple_GET_ITEM(switches, i);
        PyObject *attributes = PyObject_GenericGetDict(PyTuple_GET_ITEM(one, 0), NULL);
        if (attributes == NULL) {
            PyErr_Clear();
            return 0;
        }
        PyObject *value = PyDict_GetItemWithError(attributes, PyTuple_GET_ITEM(one, 1));
        int on = value == NULL ? PyErr_Occurred() != NULL : PyObject_IsTrue(value);
        Py_DECREF(attributes);
        if (on) {
            PyErr_Clear();
            return 0;
        }
    }
    return 1;
}

/* Take the addresses of tensors of a launch; 0 if the arguments are not of its kind. */
static int take(Launch *self, PyObject *const *arguments, Py_ssize_t count, char **addresses)
{
    uintptr_t bits = 0;
    int tensor = 0;
    View x;
    if (count != self->arguments)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!self->given[i]) {
            if (arguments[i] != Py_None)
                return 0;
            continue;
        }
        int again = i > 0 && self->given[i - 1] && arguments[i] == arguments[i - 1];
        if ((!again && !view(arguments[i], &x)) || memcmp(&x.device, &self->device, sizeof(Device)) != 0 ||
            memcmp(&x.type, &self->types[tensor], sizeof(Type)) != 0)
            return 0;
        addresses[tensor] = x.data + self->starts[tensor];
        bits |= (uintptr_t)addresses[tensor++];
    }
    return bits % 16 == 0; /* Triton may have compiled for such addresses */
}

/* Whether it was launched. If not, Triton's launcher knows what to do, or how to say it. */
static int launch(Launch *self, PyObject *const *arguments, Py_ssize_t count)
{
    char *addresses[MOST_TENSORS];
    void *context, *stream, *parameters[MOST_PARAMETERS];
    if (!take(self, arguments, count, addresses) || current_context(&context) != 0 || context != self->context ||
        !undisturbed(self->switches) || !current_stream(&self->device, &stream))
        return 0;
    for (int i = 0; i < self->maps; i++) {
        char *address = addresses[self->mapped[i]];
        if (address == self->map_addresses[i])
            continue;
        self->map_addresses[i] = NOWHERE;
        if (replace_address(self->memory + MAP_BYTES * i, address) != 0)
            return 0;
        self->map_addresses[i] = address;
    }
    memcpy(self->memory + MAP_BYTES * self->maps, addresses, sizeof(char *) * self->tensors);
    /* The driver may wait for the device, and another thread launch this meanwhile. */
    alignas(MAP_BYTES) char memory[MOST_BYTES];
    memcpy(memory, self->memory, self->bytes);
    for (int i = 0; i < self->parameters; i++)
        parameters[i] = memory + self->offsets[i];
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = launch_kernel(self->function, self->programs, 1, 1, self->threads, 1, 1, self->shared, stream, parameters,
                           NULL);
    Py_END_ALLOW_THREADS
    return status == 0;
}

static PyObject *attempt(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    return PyBool_FromLong(launch((Launch *)self, arguments, count));
}

/* Launch, one way or the other. */
static PyObject *launch_call(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    Launch *self = (Launch *)object;
    if (names == NULL && launch(self, arguments, PyVectorcall_NARGS(flags)))
        Py_RETURN_NONE;
    PyObject *otherwise = self->otherwise;
    Py_INCREF(otherwise); /* it may replace this one */
    PyObject *found = PyObject_Vectorcall(otherwise, arguments, flags & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    Py_DECREF(otherwise);
    return found;
}

static int launch_traverse(PyObject *object, visitproc visit, void *arg)
{
    Launch *self = (Launch *)object;
    Py_VISIT(self->switches);
    Py_VISIT(self->otherwise);
    return 0;
}

static void launch_dealloc(PyObject *object)
{
    Launch *self = (Launch *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->switches);
    Py_XDECREF(self->otherwise);
    PyMem_Free(self->allocated);
    Py_TYPE(object)->tp_free(object);
}

/* Take integers of a tuple; how many, or -1 with an exception. */
static int integers(PyObject *tuple, int *found, int most)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count > most) {
        PyErr_SetString(PyExc_ValueError, "more than a launch holds");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        found[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(tuple, i));
        if (PyErr_Occurred())
            return -1;
    }
    return (int)count;
}

static int fill(Launch *self, const Py_buffer *image, PyObject *offsets, PyObject *mapped, PyObject *tensors,
                PyObject *starts)
{
    if (image->len > MOST_BYTES || PyTuple_GET_SIZE(tensors) > MOST_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "more than a launch holds");
        return 0;
    }
    if (PyTuple_GET_SIZE(starts) != PyTuple_GET_SIZE(tensors)) {
        PyErr_SetString(PyExc_ValueError, "each tensor begins somewhere");
        return 0;
    }
    if (exchange == NULL || current_context(&self->context) != 0 || self->context == NULL) {
        PyErr_SetString(PyExc_ValueError, "there is no context");
        return 0;
    }
    if ((self->parameters = integers(offsets, self->offsets, MOST_PARAMETERS)) < 0 ||
        (self->maps = integers(mapped, self->mapped, MOST_TENSORS)) < 0)
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        View x;
        self->given[i] = PyTuple_GET_ITEM(tensors, i) != Py_None;
        if (!self->given[i])
            continue;
        if (!view(PyTuple_GET_ITEM(tensors, i), &x) ||
            (self->tensors > 0 && memcmp(&x.device, &self->device, sizeof(Device)) != 0)) {
            PyErr_SetString(PyExc_ValueError, "these are not tensors of one device");
            return 0;
        }
        self->device = x.device;
        self->starts[self->tensors] = PyLong_AsLongLong(PyTuple_GET_ITEM(starts, i));
        if (PyErr_Occurred())
            return 0;
        self->types[self->tensors++] = x.type;
    }
    self->arguments = (int)PyTuple_GET_SIZE(tensors);
    self->bytes = (int)image->len;
    if ((self->allocated = PyMem_Malloc(image->len + MAP_BYTES)) == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (int i = 0; i < self->maps; i++)
        self->map_addresses[i] = NOWHERE;
    self->memory = self->allocated + MAP_BYTES - (uintptr_t)self->allocated % MAP_BYTES;
    memcpy(self->memory, image->buf, image->len);
    return 1;
}

static PyObject *launch_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    unsigned long long function;
    unsigned programs, threads, shared;
    Py_buffer image;
    PyObject *offsets, *mapped, *tensors, *starts, *switches, *otherwise;
    if (!PyArg_ParseTuple(arguments, "KIIIy*O!O!O!O!O!O", &function, &programs, &threads, &shared, &image,
                          &PyTuple_Type, &offsets, &PyTuple_Type, &mapped, &PyTuple_Type, &tensors, &PyTuple_Type,
                          &starts, &PyTuple_Type, &switches, &otherwise))
        return NULL;
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (self != NULL) {
        Py_INCREF(switches);
        Py_INCREF(otherwise);
        self->switches = switches;
        self->otherwise = otherwise;
        self->vectorcall = launch_call;
        self->function = (void *)(uintptr_t)function;
        self->programs = programs;
        self->threads = threads;
        self->shared = shared;
        if (!fill(self, &image, offsets, mapped, tensors, starts))
            Py_CLEAR(self);
    }
    PyBuffer_Release(&image);
    return (PyObject *)self;
}

static PyMethodDef launch_methods[] = {
    {"attempt", (PyCFunction)(void (*)(void))attempt, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* It is given what it calls otherwise, and never another: cycles through it are broken by what they pass through. */
static PyTypeObject launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "flashmask_native.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_methods = launch_methods,
    .tp_traverse = launch_traverse,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = launch_new,
    .tp_dealloc = launch_dealloc,
};

/* Clear the memory of a contiguous tensor; whether that was done, which it is not while a graph is captured. */
static PyObject *clear(PyObject *module, PyObject *tensor)
{
    View x;
    void *stream;
    if (!view(tensor, &x) || captured(&x.device, &stream) != 0)
        Py_RETURN_FALSE;
    int64_t numbers = 1;
    for (int i = x.axes - 1; i >= 0; i--) {
        if (x.shape[i] != 1 && x.strides[i] != numbers)
            Py_RETURN_FALSE;
        numbers *= x.shape[i];
    }
    size_t bytes = (size_t)numbers * ((x.type.bits * x.type.lanes + 7) / 8);
    int status;
    Py_BEGIN_ALLOW_THREADS /* the driver may wait for the device */
    status = set_bytes(x.data, 0, bytes, stream);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(status == 0);
}

/* Whether a graph is being captured on the current stream of a tensor's device; None if nothing tells. */
static PyObject *capturing(PyObject *module, PyObject *tensor)
{
    View x;
    void *stream;
    int found = view(tensor, &x) ? captured(&x.device, &stream) : -1;
    if (found < 0)
        Py_RETURN_NONE;
    return PyBool_FromLong(found);
}

/* Whether it is a tensor, and no class has a say. */
static int is_plain(PyObject *tensor)
{
    return Py_TYPE(tensor) == tensor_type || Py_TYPE(tensor) == parameter_type;
}

/* Write words that tell the layout of a tensor, and whether it begins at a multiple of 16. How many, or 0 for what has no
   memory, or other values than its memory holds, for a tensor of which a class has a say, and where there is no room.

   Some dtypes that attention refuses are not told apart, nor is a conjugated tensor, which it refuses, too. */
static int layout(PyObject *tensor, int64_t *words, int room)
{
    View x;
    if (!is_plain(tensor) || !view(tensor, &x) || x.data == NULL || 2 + 2 * x.axes > room)
        return 0;
    /* What is negated when it is read is a part of complex numbers, which are not made of these; of any type only by
       `torch._neg_view`, which is private. */
    if (x.type.code != INTEGER && x.type.code != NATURAL && x.type.code != BFLOAT) {
        PyObject *negative = PyObject_VectorcallMethod(is_negative, &tensor, 1, NULL);
        if (negative == NULL)
            PyErr_Clear();
        Py_XDECREF(negative);
        if (negative != Py_False)
            return 0;
    }
    words[0] = (int64_t)x.device.type << 32 | (uint32_t)x.device.index;
    words[1] = (int64_t)x.axes << 40 | (int64_t)((uintptr_t)x.data % 16 == 0) << 32 | (int64_t)x.type.lanes << 16 |
               x.type.bits << 8 | x.type.code;
    for (int i = 0; i < x.axes; i++) {
        words[2 + 2 * i] = x.shape[i];
        words[3 + 2 * i] = x.strides[i];
    }
    return 2 + 2 * x.axes;
}

/* What a function returns: 1 for true, 0 for false, -1 with an exception. */
static int answer(PyObject *function, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *found = PyObject_Vectorcall(function, arguments, count, NULL);
    if (found == NULL)
        return -1;
    int yes = PyObject_IsTrue(found);
    Py_DECREF(found);
    return yes;
}

/* Whether a tensor of some has a derivative: 1 or 0, or -1 with an exception. */
static int differentiable(PyObject *const *tensors, Py_ssize_t count)
{
    int yes = 0;
    for (Py_ssize_t i = 0; i < count && !yes; i++) {
        if (!is_plain(tensors[i]))
            continue;
        PyObject *found = PyObject_GetAttr(tensors[i], requires_grad);
        if (found == NULL)
            return -1;
        yes = PyObject_IsTrue(found);
        Py_DECREF(found);
    }
    return yes;
}

/* Write words for the mode that torch is in on the device of the first tensor. How many, 0 for another device than a CPU
   or GPU and while a graph is being captured there, or -1 with an exception. */
static int mode(PyObject *const *tensors, Py_ssize_t count, int64_t *words, int room)
{
    View x;
    void *stream;
    if (room < 2 || count == 0 || !view(tensors[0], &x) || (x.device.type != CPU && x.device.type != GPU) ||
        (x.device.type == GPU && captured(&x.device, &stream) != 0))
        return 0;
    PyObject *device = PyTuple_GET_ITEM(devices, x.device.type == GPU);
    int deterministic, differentiated, autocast;
    if ((deterministic = answer(is_deterministic, NULL, 0)) < 0 ||
        (differentiated = answer(is_grad_enabled, NULL, 0)) < 0)
        return -1;
    if (differentiated && (differentiated = differentiable(tensors, count)) < 0)
        return -1;
    if ((autocast = answer(any_autocast, NULL, 0)) < 0 || (autocast && (autocast = answer(is_autocast, &device, 1)) < 0))
        return -1;
    words[0] = deterministic | differentiated << 1;
    words[1] = 0;
    if (autocast) {
        PyObject *dtype = PyObject_Vectorcall(autocast_dtype, &device, 1, NULL);
        if (dtype == NULL)
            return -1;
        words[1] = (intptr_t)dtype; /* of which there is one of a kind, for good */
        Py_DECREF(dtype);
    }
    return 2;
}

/* Words as bytes. */
static PyObject *bytes_of(const int64_t *words, int used)
{
    uint64_t sum = 0;
    for (int i = 0; i < used; i++)
        sum = sum * 0x9e3779b97f4a7c15 + (uint64_t)words[i];
    PyObject **place = &kept[(sum >> 32) % KEPT];
    Py_ssize_t size = used * (Py_ssize_t)sizeof(int64_t);
    if (*place == NULL || PyBytes_GET_SIZE(*place) != size || memcmp(PyBytes_AS_STRING(*place), words, size) != 0) {
        PyObject *made = PyBytes_FromStringAndSize((const char *)words, size);
        if (made == NULL)
            return NULL;
        Py_XSETREF(*place, made);
    }
    Py_INCREF(*place);
    return *place;
}

/* Bytes that tell calls apart as `repeated._signature` does (but for what `layout` says), or None. A compiler does not look
   in here: the caller asks whether there is one. */
static PyObject *signature(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t words[MOST_WORDS];
    if (interceptors == NULL)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(idle); i++) {
        PyObject *one = PyTuple_GET_ITEM(idle, i);
        PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(one, 0), PyTuple_GET_ITEM(one, 1));
        if (value != PyTuple_GET_ITEM(one, 2)) { /* of these values there is one of a kind */
            PyErr_Clear();
            Py_RETURN_NONE;
        }
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(interceptors); i++) {
        int intercepted = answer(PyTuple_GET_ITEM(interceptors, i), NULL, 0);
        if (intercepted < 0)
            return NULL;
        if (intercepted)
            Py_RETURN_NONE;
    }
    int used = mode(arguments, count, words, MOST_WORDS);
    if (used < 0)
        return NULL;
    if (used == 0)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < count; i++) {
        int more = 1;
        if (used == MOST_WORDS)
            Py_RETURN_NONE;
        if (arguments[i] == Py_None)
            words[used] = -1;
        else if ((more = layout(arguments[i], words + used, MOST_WORDS - used)) == 0)
            Py_RETURN_NONE;
        used += more;
    }
    return bytes_of(words, used);
}

/* Take what tensors offer, their classes, and the addresses of the driver's functions. */
static PyObject *configure(PyObject *module, PyObject *arguments)
{
    PyObject *capsule, *tensor, *parameter;
    unsigned long long launching, replacing, setting, capturing, context;
    if (!PyArg_ParseTuple(arguments, "OO!O!KKKKK", &capsule, &PyType_Type, &tensor, &PyType_Type, &parameter,
                          &launching, &replacing, &setting, &capturing, &context))
        return NULL;
    const Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (found == NULL)
        return NULL;
    if (found->major != 1 || found->view == NULL) {
        PyErr_SetString(PyExc_ValueError, "tensors offer other functions");
        return NULL;
    }
    Py_INCREF(arguments); /* and with it what it holds, for good */
    exchange = found;
    tensor_type = (PyTypeObject *)tensor;
    parameter_type = (PyTypeObject *)parameter;
    launch_kernel = (void *)(uintptr_t)launching;
    replace_address = (void *)(uintptr_t)replacing;
    set_bytes = (void *)(uintptr_t)setting;
    is_capturing = (void *)(uintptr_t)capturing;
    current_context = (void *)(uintptr_t)context;
    Py_RETURN_NONE;
}

/* Take the functions that tell of torch's mode, for `signature`. */
static PyObject *watch(PyObject *module, PyObject *arguments)
{
    PyObject *intercept, *values, *deterministic, *grad, *any, *autocast, *dtype;
    if (!PyArg_ParseTuple(arguments, "O!O!OOOOO", &PyTuple_Type, &intercept, &PyTuple_Type, &values, &deterministic,
                          &grad, &any, &autocast, &dtype))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
        PyObject *dict, *name, *value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(values, i), "O!UO", &PyDict_Type, &dict, &name, &value))
            return NULL;
    }
    if (is_negative == NULL && (is_negative = PyUnicode_InternFromString("is_neg")) == NULL)
        return NULL;
    if (requires_grad == NULL && (requires_grad = PyUnicode_InternFromString("requires_grad")) == NULL)
        return NULL;
    if (devices == NULL && (devices = Py_BuildValue("(ss)", "cpu", "cuda")) == NULL)
        return NULL;
    Py_INCREF(arguments); /* likewise */
    interceptors = intercept;
    idle = values;
    is_deterministic = deterministic;
    is_grad_enabled = grad;
    any_autocast = any;
    is_autocast = autocast;
    autocast_dtype = dtype;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"capturing", capturing, METH_O, NULL},
    {"clear", clear, METH_O, NULL},
    {"configure", configure, METH_VARARGS, NULL},
    {"signature", (PyCFunction)(void (*)(void))signature, METH_FASTCALL, NULL},
    {"watch", watch, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "flashmask_native", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit_flashmask_native(void)
{
    if (PyType_Ready(&launch_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    Py_INCREF(&launch_type);
    if (PyModule_AddObject(module, "Launch", (PyObject *)&launch_type) < 0) {
        Py_DECREF(&launch_type);
        Py_CLEAR(module);
    }
    return module;
}
