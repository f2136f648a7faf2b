/* Launches of kernels whose parameters are packed already, by the CUDA driver's own functions; compiled by direct.py.

   Tensors are read through the functions that they offer to C (DLPack 1.3, `__dlpack_c_exchange_api__`), for none of the
   headers of PyTorch is there for sure. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdalign.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MAP_BYTES = 128, MOST_BYTES = 4096, MOST_PARAMETERS = 256, MOST_TENSORS = 32, MOST_WORDS = 256 };

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
static PyObject *is_negative; /* "is_neg" */

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
    if (!PyObject_TypeCheck(tensor, tensor_type))
        return 0;
    if (exchange->view(tensor, found) != 0) {
        PyErr_Clear();
        return 0;
    }
    found->data += found->offset;
    return 1;
}

/* Launches of one kernel that differ in the addresses of tensors alone.

   The parameters lie in memory as the driver takes them: tensor maps first, then the addresses of the tensors, then
   values. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *switches;
    void *function, *context;
    unsigned programs, threads, shared;
    int arguments, tensors, maps, parameters, bytes;
    Device device;
    Type types[MOST_TENSORS];             /* of the tensors */
    char given[MOST_TENSORS];             /* of each argument, whether it is a tensor and not None */
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
    if (count != self->arguments)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        View x;
        if (!self->given[i]) {
            if (arguments[i] != Py_None)
                return 0;
            continue;
        }
        if (!view(arguments[i], &x) || memcmp(&x.device, &self->device, sizeof(Device)) != 0 ||
            memcmp(&x.type, &self->types[tensor], sizeof(Type)) != 0)
            return 0;
        bits |= (uintptr_t)x.data;
        addresses[tensor++] = x.data;
    }
    return bits % 16 == 0; /* Triton may have compiled for such addresses */
}

/* Whether it was launched. If not, Triton's launcher knows what to do, or how to say it. */
static PyObject *launch(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    Launch *self = (Launch *)object;
    char *addresses[MOST_TENSORS];
    void *context, *stream, *parameters[MOST_PARAMETERS];
    if (names != NULL || !take(self, arguments, PyVectorcall_NARGS(flags), addresses) ||
        current_context(&context) != 0 || context != self->context || !undisturbed(self->switches))
        Py_RETURN_FALSE;
    if (exchange->stream(self->device.type, self->device.index, &stream) != 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    for (int i = 0; i < self->maps; i++) {
        char *address = addresses[self->mapped[i]];
        if (address == self->map_addresses[i])
            continue;
        self->map_addresses[i] = NOWHERE;
        if (replace_address(self->memory + MAP_BYTES * i, address) != 0)
            Py_RETURN_FALSE;
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
    return PyBool_FromLong(status == 0);
}

static void launch_dealloc(PyObject *object)
{
    Launch *self = (Launch *)object;
    Py_XDECREF(self->switches);
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

static int fill(Launch *self, const Py_buffer *image, PyObject *offsets, PyObject *mapped, PyObject *tensors)
{
    if (image->len > MOST_BYTES || PyTuple_GET_SIZE(tensors) > MOST_TENSORS) {
        PyErr_SetString(PyExc_ValueError, "more than a launch holds");
        return 0;
    }
    if (current_context(&self->context) != 0 || self->context == NULL) {
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
    PyObject *offsets, *mapped, *tensors, *switches;
    if (!PyArg_ParseTuple(arguments, "KIIIy*O!O!O!O!", &function, &programs, &threads, &shared, &image, &PyTuple_Type,
                          &offsets, &PyTuple_Type, &mapped, &PyTuple_Type, &tensors, &PyTuple_Type, &switches))
        return NULL;
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (self != NULL) {
        Py_INCREF(switches);
        self->switches = switches;
        self->vectorcall = launch;
        self->function = (void *)(uintptr_t)function;
        self->programs = programs;
        self->threads = threads;
        self->shared = shared;
        if (!fill(self, &image, offsets, mapped, tensors))
            Py_CLEAR(self);
    }
    PyBuffer_Release(&image);
    return (PyObject *)self;
}

static PyTypeObject launch_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "flashmask_direct.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = launch_new,
    .tp_dealloc = launch_dealloc,
};

/* Clear the memory of a tensor without gaps; whether that was done, which it is not while a graph is captured. */
static PyObject *clear(PyObject *module, PyObject *tensor)
{
    View x;
    void *stream;
    int capturing;
    if (!view(tensor, &x))
        Py_RETURN_FALSE;
    if (exchange->stream(x.device.type, x.device.index, &stream) != 0) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (is_capturing(stream, &capturing) != 0 || capturing != 0)
        Py_RETURN_FALSE;
    size_t bytes = x.type.bits / 8 * x.type.lanes;
    for (int i = 0; i < x.axes; i++)
        bytes *= (size_t)x.shape[i];
    return PyBool_FromLong(set_bytes(x.data, 0, bytes, stream) == 0);
}

/* Bytes that tell the layouts of tensors apart, and whether they begin at multiples of 16; Nones are told apart, too.
   None for a tensor whose memory does not hold its values, and for one of which a class has a say. */
static PyObject *layouts(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int64_t words[MOST_WORDS];
    int used = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = arguments[i];
        View x;
        if (used == MOST_WORDS)
            Py_RETURN_NONE;
        if (one == Py_None) {
            words[used++] = -1;
            continue;
        }
        if ((Py_TYPE(one) != tensor_type && Py_TYPE(one) != parameter_type) || !view(one, &x) || x.data == NULL ||
            used + 2 + 2 * x.axes > MOST_WORDS)
            Py_RETURN_NONE;
        PyObject *negative = PyObject_VectorcallMethod(is_negative, &one, 1, NULL);
        if (negative == NULL)
            return NULL;
        Py_DECREF(negative);
        if (negative != Py_False)
            Py_RETURN_NONE;
        words[used++] = (int64_t)x.device.type << 32 | (uint32_t)x.device.index;
        words[used++] = (int64_t)x.axes << 40 | (int64_t)((uintptr_t)x.data % 16 == 0) << 32 |
                        (int64_t)x.type.lanes << 16 | x.type.bits << 8 | x.type.code;
        for (int j = 0; j < x.axes; j++) {
            words[used++] = x.shape[j];
            words[used++] = x.strides[j];
        }
    }
    return PyBytes_FromStringAndSize((const char *)words, used * (Py_ssize_t)sizeof(int64_t));
}

/* Take the functions of tensors, their classes, and the addresses of the driver's functions. */
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
    exchange = found;
    if (is_negative == NULL && (is_negative = PyUnicode_InternFromString("is_neg")) == NULL)
        return NULL;
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    tensor_type = (PyTypeObject *)tensor;
    parameter_type = (PyTypeObject *)parameter;
    launch_kernel = (void *)(uintptr_t)launching;
    replace_address = (void *)(uintptr_t)replacing;
    set_bytes = (void *)(uintptr_t)setting;
    is_capturing = (void *)(uintptr_t)capturing;
    current_context = (void *)(uintptr_t)context;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"clear", clear, METH_O, NULL},
    {"configure", configure, METH_VARARGS, NULL},
    {"layouts", (PyCFunction)(void (*)(void))layouts, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "flashmask_direct", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit_flashmask_direct(void)
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
